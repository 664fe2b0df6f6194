"""Muon on DeepSpeed's ZeRO partitions; the only place in muon_core that imports deepspeed, and only when called."""
