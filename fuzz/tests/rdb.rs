//! See `granary_fuzz::rdb`.

#[test]
fn rdb() {
    bolero::check!()
        .with_test_time(granary_fuzz::test_time())
        .with_iterations(usize::MAX)
        .with_max_len(granary_fuzz::BYTES_MAX)
        .for_each(granary_fuzz::rdb::run);
}
