"""The engine that carries out a plan: direct I/O, digests, journal, destination."""
