"""What the backends over a transfer library share: regions as blobs, links, rows and processes of probes."""
