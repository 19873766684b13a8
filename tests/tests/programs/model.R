# Sorting, a linear model and a distance matrix.
count <- as.integer(commandArgs(TRUE)[1])
x <- (seq_len(count) * 7919) %% 1000003
y <- sqrt(x) + seq_len(count) %% 13
fit <- lm(y ~ x + I(x^2))
cat(format(coef(fit), digits = 8), "\n")
cat(sum(order(y)[1:1000]), length(unique(x)), "\n")
groups <- tapply(y, x %% 97, mean)
cat(format(sum(groups), digits = 10), "\n")
d <- dist(matrix(y[1:4000], ncol = 4))
cat(format(sum(d), digits = 10), "\n")
