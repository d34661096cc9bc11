"""dsrun's findings held against what DeepSpeed does: configs are drawn, read and trained, and compared.

draw makes the configs, reading and training ask DeepSpeed, compare asks dsrun and names what doesn't agree, known
holds the disagreements that are explained. bench/agreement.py and tests/config/test_agreement.py use them.
"""
