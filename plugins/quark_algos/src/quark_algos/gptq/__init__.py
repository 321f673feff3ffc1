"""GPTQ, GPTAQ and Qronos: algorithms that choose the codes of a matrix column by column.

The notation follows the papers. ``W [N, K]`` is a weight, ``X [K, T]`` is its input in the float model, and
``X̃`` is its input in the quantized model. ``H = X̃ X̃ᵀ`` is the Hessian, and ``D = (X − X̃) X̃ᵀ``. λ is the
damping. ``Q`` is the rounded weight, and ``E = W − Q`` is the rounding error. W, Q and E are stored
transposed, for example ``Wt = Wᵀ [K, N]``, so that a column of W is a row of contiguous memory.
"""
