from vllm.dcu import diag as dcu_diag
