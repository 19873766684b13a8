# pandas: a join and groups.
import sys
import numpy as np
import pandas as pd
count = int(sys.argv[1])
random = np.random.default_rng(3)
orders = pd.DataFrame({"customer": random.integers(0, count // 10, count),
                       "price": random.integers(1, 10000, count)})
customers = pd.DataFrame({"customer": np.arange(count // 10),
                          "town": [f"town {i * 37 % 101}" for i in range(count // 10)]})
joined = orders.merge(customers, on="customer")
groups = joined.groupby("town")["price"].agg(["sum", "count", "max"]).sort_values(["sum", "count"])
print(groups.to_csv())
print(int(joined.sort_values(["price", "customer"])["customer"].iloc[count // 2]))
