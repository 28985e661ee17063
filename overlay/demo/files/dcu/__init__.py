"""What the demo adds to vLLM: a marker that shows which GEMM a request really ran."""
