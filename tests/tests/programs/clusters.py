# scikit-learn: k-means with two threads.
import hashlib, os, sys
os.environ["OMP_NUM_THREADS"] = "2"
import numpy as np
from sklearn.cluster import KMeans
count = int(sys.argv[1])
random = np.random.default_rng(2)
centres = random.uniform(-50, 50, (10, 8))
points = (centres[random.integers(0, 10, count)] + random.standard_normal((count, 8)))
fit = KMeans(n_clusters=10, init=centres, n_init=1, max_iter=20).fit(points)
print(hashlib.sha256(fit.labels_.astype(np.int32).tobytes()).hexdigest(), "%.6e" % fit.inertia_)
