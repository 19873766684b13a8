//! See `granary_fuzz::assist`.

#[test]
fn assist() {
    bolero::check!()
        .with_test_time(granary_fuzz::test_time())
        .with_iterations(usize::MAX)
        .with_max_len(granary_fuzz::BYTES_MAX)
        .for_each(granary_fuzz::assist::run);
}
