! Static arrays: a red-black relaxation on a grid, and a matrix product.
module fields
  implicit none
  integer, parameter :: n = 1200, m = 300
  real(8), save :: grid(n, n), old(n, n), left(m, m), right(m, m), product(m, m)
end module fields

program relaxation
  use fields
  implicit none
  integer :: i, j, step
  do j = 1, n
    do i = 1, n
      grid(i, j) = mod(i * 7 + j * 13, 101)
    end do
  end do
  do step = 1, 8
    old = grid
    do j = 2, n - 1
      do i = 2, n - 1
        grid(i, j) = 0.25d0 * (old(i - 1, j) + old(i + 1, j) + old(i, j - 1) + old(i, j + 1))
      end do
    end do
  end do
  do j = 1, m
    do i = 1, m
      left(i, j) = mod(i * j, 17)
      right(i, j) = mod(i + j, 19)
    end do
  end do
  product = matmul(left, right)
  print '(es22.14)', sum(grid), grid(n / 2, n / 3), sum(product)
end program relaxation
