//! Kubernetes quantities ("250m", "64Mi", "1e3") as whole numbers, rounded up as upstream does.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The quantity in thousandths, as processor time is counted. What is no quantity counts as nothing.
pub fn milli(quantity: &Quantity) -> i64 {
    scaled(&quantity.0, 1000).unwrap_or(0)
}

/// The quantity in units, as bytes are counted. What is no quantity counts as nothing.
pub fn units(quantity: &Quantity) -> i64 {
    scaled(&quantity.0, 1).unwrap_or(0)
}

/// The quantity in units, rounded up; `None` when the text is no quantity or too large.
#[must_use]
pub fn parse(text: &str) -> Option<i64> {
    scaled(text, 1)
}

/// `text × scale`, rounded up; `None` when the text is no quantity or too large.
pub(crate) fn scaled(text: &str, scale: i128) -> Option<i64> {
    let split = text.find(|c: char| !matches!(c, '0'..='9' | '.' | '+' | '-')).unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let (mantissa, decimals) = decimal(number)?;
    let (up, down) = factor(suffix)?;
    let over = mantissa.checked_mul(up)?.checked_mul(scale)?;
    let under = down.checked_mul(10_i128.checked_pow(decimals)?)?;
    let rounded = over.div_euclid(under) + i128::from(over.rem_euclid(under) != 0);
    i64::try_from(rounded).ok()
}

/// The digits as one number, and how many of them stood behind the point.
fn decimal(number: &str) -> Option<(i128, u32)> {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if whole.trim_start_matches(['+', '-']).is_empty() && part.is_empty() {
        return None;
    }
    let digits = format!("{whole}{part}");
    Some((digits.parse().ok()?, u32::try_from(part.len()).ok()?))
}

/// A suffix as the multiplier and the divisor that it stands for.
fn factor(suffix: &str) -> Option<(i128, i128)> {
    const DECIMAL: [&str; 6] = ["k", "M", "G", "T", "P", "E"];
    const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    const SMALL: [&str; 3] = ["m", "u", "n"];
    let position =
        |table: &[&str]| table.iter().position(|s| *s == suffix).and_then(|i| u32::try_from(i + 1).ok());
    if suffix.is_empty() {
        return Some((1, 1));
    }
    if let Some(power) = position(&BINARY) {
        return Some((1024_i128.pow(power), 1));
    }
    if let Some(power) = position(&DECIMAL) {
        return Some((1000_i128.pow(power), 1));
    }
    if let Some(power) = position(&SMALL) {
        return Some((1, 1000_i128.pow(power)));
    }
    let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    let power = 10_i128.checked_pow(exponent.unsigned_abs())?;
    Some(if exponent >= 0 { (power, 1) } else { (1, power) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_upstream_reads_them() {
        let cases = [
            ("250m", Some(250), Some(1)),
            ("1", Some(1000), Some(1)),
            ("0.1", Some(100), Some(1)),
            ("1.5", Some(1500), Some(2)),
            ("64Mi", Some(67_108_864_000), Some(67_108_864)),
            ("1e3", Some(1_000_000), Some(1000)),
            ("1E", None, Some(1_000_000_000_000_000_000)),
            ("2E2", Some(200_000), Some(200)),
            ("12k", Some(12_000_000), Some(12_000)),
            ("100n", Some(1), Some(1)),
            ("0", Some(0), Some(0)),
            ("", None, None),
            ("12x", None, None),
            ("Mi", None, None),
        ];
        for (text, milli, units) in cases {
            assert_eq!(scaled(text, 1000), milli, "{text} in thousandths");
            assert_eq!(scaled(text, 1), units, "{text} in units");
        }
    }
}
