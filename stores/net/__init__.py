"""What reads over a network share: connections, their pace, retries, redirects and streams."""
