    if dcu_diag.ENABLED and not torch.compiler.is_compiling():
        dcu_diag.report("cpu_unquantized_gemm", x, weight)
