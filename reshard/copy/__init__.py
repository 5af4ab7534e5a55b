"""The engine that carries out a plan: digests, journal, destination."""
