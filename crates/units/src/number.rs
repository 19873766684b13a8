//! Formatting of numbers in tables and pictures.

/// Formats a number to three significant digits, with an exponent only for very large or very
/// small numbers.
pub fn significant(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let magnitude = value.abs().log10().floor();
    if !(-4.0..15.0).contains(&magnitude) {
        return format!("{value:.2e}");
    }
    // Rounding may carry into the next magnitude: 9.999 becomes 10.0, with one decimal.
    let unit = 10f64.powf(2.0 - magnitude);
    let rounded = (value * unit).round() / unit;
    let magnitude = rounded.abs().log10().floor();
    let decimals = (2.0 - magnitude).max(0.0) as usize;
    if rounded.abs() >= 1000.0 {
        let sign = if rounded < 0.0 { "-" } else { "" };
        return format!("{sign}{}", thousands(value.abs().round() as u64));
    }
    format!("{rounded:.decimals$}")
}

/// Formats a number to three significant digits with an SI prefix: `6.80M`.
pub fn engineering(value: f64) -> String {
    let (prefix, scale) = [("G", 1e9), ("M", 1e6), ("k", 1e3)]
        .into_iter()
        .find(|(_, scale)| value.abs() >= scale * 0.9995)
        .unwrap_or(("", 1.0));
    format!("{}{prefix}", significant(value / scale))
}

/// Formats a count with thousands separators: `6,800,000`.
pub fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formatted_numbers_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.29, "0.290"),
            (9.999, "10.0"),
            (99.96, "100"),
            (999.6, "1,000"),
            (1234.0, "1,234"),
            (-2.5, "-2.50"),
            (-12345.0, "-12,345"),
            (1.23e-9, "1.23e-9"),
        ] {
            assert_eq!(significant(value), text, "{value}");
        }
        for (value, text) in
            [(12.0, "12.0"), (999.9, "1.00k"), (6.8e6, "6.80M"), (0.5, "0.500"), (2e9, "2.00G")]
        {
            assert_eq!(engineering(value), text, "{value}");
        }
        assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    }
}
