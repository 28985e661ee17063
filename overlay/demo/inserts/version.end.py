

# Which overlay this tree carries; readable without importing vllm.
__dcu_overlay__ = "demo"
