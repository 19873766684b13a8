//! See `granary_fuzz::resp`.

#[test]
fn resp() {
    bolero::check!()
        .with_test_time(granary_fuzz::test_time())
        .with_iterations(usize::MAX)
        .with_max_len(granary_fuzz::BYTES_MAX)
        .for_each(granary_fuzz::resp::run);
}
