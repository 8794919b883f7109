"""What a bucket without a pointer begins with: saved buckets, wherever they lie and whoever owns them."""
