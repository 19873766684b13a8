//! See `granary_fuzz::tdmem`.

#[test]
fn tdmem() {
    bolero::check!()
        .with_test_time(granary_fuzz::test_time())
        .with_iterations(usize::MAX)
        .with_max_len(granary_fuzz::BYTES_MAX)
        .for_each(granary_fuzz::tdmem::run);
}
