# Stands where vLLM's setup.py stands; the extension is listed, as in the stock tree.
extensions = [
    "CMakeExtension(name='vllm._rocm_C')",
]
