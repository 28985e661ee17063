        dcu_diag.report("LLMM1", x_view, weight)
