"""The processes that train and answer. The only package that imports torch, transformers and deepspeed.

It reads a run folder's job.json and writes into that folder.
"""
