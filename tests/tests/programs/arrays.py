# NumPy: decompositions, sorting, Fourier transforms.
import sys
import numpy as np
size = int(sys.argv[1])
random = np.random.default_rng(1)
a = random.standard_normal((size, size))
print("%.8e" % np.linalg.svd(a, compute_uv=False)[0], "%.8e" % np.linalg.slogdet(a)[1])
b = random.integers(0, 1 << 40, size * size * 4)
b.sort()
print(int(b[len(b) // 3]), int(np.bitwise_xor.reduce(b)))
c = np.fft.fft(random.standard_normal(size * size * 2))
print("%.8e" % np.abs(c).max())
print("%.8e" % float((a @ a.T).trace()))
