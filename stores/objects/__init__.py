"""Object stores (s3, gs, az): read by ranges, written by multipart uploads, locked by an object."""
