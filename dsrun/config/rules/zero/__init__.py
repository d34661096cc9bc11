"""Rules about ZeRO: stages, buckets, communication, offload, ZenFlow, ZeRO++."""
