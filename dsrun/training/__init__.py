"""What runs in the ranks. The only package that imports torch, transformers and deepspeed.

It reads a run folder's job.json and writes into that folder; of dsrun it knows the job's value types only.
"""
