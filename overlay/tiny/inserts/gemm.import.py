from vllm.dcu import diag

