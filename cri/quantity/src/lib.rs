//! Quantities: `500m`, `1Gi`, `1e3`. Exact to one nano unit; the text form is canonical.
//!
//! The rules are those of `apimachinery/pkg/api/resource`. The runtime reads quantities in annotations of pods, and does not
//! use the API's types. `coracle_values` has the functions for those types.

use std::cmp::Ordering;
use std::fmt;

const NANO: i128 = 1_000_000_000;
/// Largest amount with a binary suffix in nano units: upstream caps these at 2^63-1.
const MAX_BINARY: i128 = i64::MAX as i128 * NANO;
/// Largest other amount in nano units: 10^29 units, which fit into 128 bits. Upstream has no limit here.
const MAX_DECIMAL: i128 = 10_i128.pow(38);
/// Decimal suffixes with their exponents.
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
/// Binary suffixes; each is 2^10 times the one before.
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// A quantity. Equality and order compare the amount only, not the notation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quantity {
    nanos: i128,
    notation: Notation,
}

/// The notation of a quantity. Upstream calls it Format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Notation {
    /// `12M`.
    #[default]
    Decimal,
    /// `12Mi`.
    Binary,
    /// `12e6`.
    Exponent,
}

/// The text is not a quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
pub struct QuantityError;

// === impl Quantity ===

impl Quantity {
    /// Parses any notation. Amounts finer than one nano unit are rounded away from zero. Amounts above the limit
    /// are capped: 2^63-1 units with a binary suffix, 10^29 units otherwise.
    pub fn parse(text: &str) -> Result<Quantity, QuantityError> {
        let (negative, rest) = match text.strip_prefix(['+', '-']) {
            Some(rest) => (text.starts_with('-'), rest),
            None => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(QuantityError);
        }
        let (notation, scale) = scale(suffix)?;
        let nanos = nanos(whole, fraction, scale);
        Ok(Quantity { nanos: if negative { -nanos } else { nanos }, notation })
    }

    /// An amount of bytes, in the notation with binary suffixes.
    pub fn of_bytes(bytes: u64) -> Quantity {
        Quantity { nanos: i128::from(bytes) * NANO, notation: Notation::Binary }
    }

    /// The amount in thousandths, the unit of CPU. Rounded away from zero; saturates at the limits of 64 bits.
    pub fn millis(self) -> i64 {
        divide(self.nanos, NANO / 1000)
    }

    /// The amount in whole units, such as bytes. Rounded away from zero; saturates at the limits of 64 bits.
    pub fn value(self) -> i64 {
        divide(self.nanos, NANO)
    }

    /// Whether the amount is a whole number.
    pub fn is_integer(self) -> bool {
        self.nanos % NANO == 0
    }

    /// The amount in whole units. `None` if it is not a whole number, or is out of range.
    pub fn whole(self) -> Option<i64> {
        (self.nanos % NANO == 0).then(|| i64::try_from(self.nanos / NANO).ok()).flatten()
    }

    /// The amount as a floating-point number, rounded.
    pub fn approximate(self) -> f64 {
        self.nanos as f64 / NANO as f64
    }

    /// -1 for negative amounts, 0 for zero, 1 for positive amounts.
    pub fn signum(self) -> i32 {
        i32::try_from(self.nanos.signum()).unwrap_or(0)
    }

    /// The amount in thousandths, rounded away from zero. It never saturates.
    pub fn thousandths(self) -> i128 {
        let step = NANO / 1000;
        self.nanos / step + if self.nanos % step == 0 { 0 } else { self.nanos.signum() }
    }

    /// Another amount in the same notation.
    #[must_use]
    pub fn with_thousandths(self, thousandths: i128) -> Quantity {
        Quantity { nanos: thousandths.saturating_mul(NANO / 1000), notation: self.notation }
    }

    /// The sum, in the notation of the left summand.
    #[must_use]
    pub fn plus(self, other: Quantity) -> Quantity {
        Quantity { nanos: self.nanos.saturating_add(other.nanos), notation: self.notation }
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Quantity) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Quantity) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Quantity) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl fmt::Display for Quantity {
    /// The canonical form: no fraction, and the largest suffix that leaves a whole number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        // A binary suffix needs a whole number of at least 1024; other amounts are written as decimals.
        if self.notation == Notation::Binary && self.is_integer() && self.nanos.abs() >= 1024 * NANO {
            let (mut number, mut step) = (self.nanos / NANO, 0);
            while number % 1024 == 0 && step + 1 < BINARY.len() {
                number /= 1024;
                step += 1;
            }
            return write!(f, "{number}{}", BINARY[step]);
        }
        let (mut number, mut exponent) = (self.nanos, -9);
        while number % 1000 == 0 {
            number /= 1000;
            exponent += 3;
        }
        match DECIMAL.iter().find(|(_, known)| *known == exponent) {
            Some((suffix, _)) if self.notation != Notation::Exponent || exponent == 0 => {
                write!(f, "{number}{suffix}")
            }
            // Above `E` there is no suffix.
            _ => write!(f, "{number}e{exponent}"),
        }
    }
}

/// The factor that a suffix stands for.
#[derive(Clone, Copy)]
enum Scale {
    /// A power of ten.
    Ten(i32),
    /// A power of two.
    Two(u32),
}

fn scale(suffix: &str) -> Result<(Notation, Scale), QuantityError> {
    if let Some((_, exponent)) = DECIMAL.iter().find(|(name, _)| *name == suffix) {
        return Ok((Notation::Decimal, Scale::Ten(*exponent)));
    }
    if let Some(step) = BINARY.iter().position(|name| *name == suffix) {
        return Ok((Notation::Binary, Scale::Two(u32::try_from(step * 10).unwrap_or(0))));
    }
    let digits = suffix.strip_prefix(['e', 'E']).ok_or(QuantityError)?;
    let exponent = digits.parse::<i32>().map_err(|_error| QuantityError)?;
    Ok((Notation::Exponent, Scale::Ten(exponent)))
}

/// The amount in nano units: rounded up, capped at the limit of the notation. Linear in the number of digits.
fn nanos(whole: &str, fraction: &str, scale: Scale) -> i128 {
    // `unit` is the number of nano units for the amount 1 with this suffix.
    let (cap, unit, power) = match scale {
        Scale::Ten(power) => (MAX_DECIMAL, NANO, power),
        Scale::Two(power) => (MAX_BINARY, NANO << power, 0),
    };
    let digits = format!("{whole}{fraction}");
    let significant = digits.trim_start_matches('0');
    let length = |text: &str| i64::try_from(text.len()).unwrap_or(i64::MAX / 4);
    // Position of the decimal point in `significant`. It is negative or beyond the end if zeros must be added there.
    let point = length(whole) + i64::from(power) - (length(&digits) - length(significant));
    let significant = significant.trim_end_matches('0');
    if significant.is_empty() {
        return 0;
    }
    // At least 10^30 units are above both caps. An amount below 10^-40 units is less than one nano unit.
    if point > 30 {
        return cap;
    }
    if point < -40 {
        return 1;
    }
    let split = usize::try_from(point).unwrap_or(0).min(significant.len());
    let (before, behind) = significant.split_at(split);
    let zeros = usize::try_from(point - length(before)).unwrap_or(0);
    let before: i128 = format!("0{before}{}", "0".repeat(zeros)).parse().unwrap_or(cap);
    let Some(before) = before.checked_mul(unit) else { return cap };
    let leading_zeros = usize::try_from(-point).unwrap_or(0);
    let behind = "0".repeat(leading_zeros) + behind;
    before.saturating_add(fraction_units(&behind, unit)).min(cap)
}

/// `0.digits × unit`, rounded up. The division at each digit drops remainders; the result is the same as with one
/// division at the end.
fn fraction_units(digits: &str, unit: i128) -> i128 {
    let (mut amount, mut is_exact) = (0, true);
    for digit in digits.bytes().rev() {
        let sum = amount + i128::from(digit - b'0') * unit;
        is_exact &= sum % 10 == 0;
        amount = sum / 10;
    }
    amount + i128::from(!is_exact)
}

/// Divides, and rounds away from zero. Saturates at the limits of 64 bits.
fn divide(number: i128, by: i128) -> i64 {
    let rounded = number / by + if number % by == 0 { 0 } else { number.signum() };
    i64::try_from(rounded).unwrap_or(if number < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_a_canonical_form() {
        let cases = [
            ("0", "0"),
            ("0.0", "0"),
            ("1", "1"),
            ("0.5", "500m"),
            ("1000m", "1"),
            ("1500m", "1500m"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("1000Ki", "1000Ki"),
            ("512", "512"),
            ("1Ki", "1Ki"),
            ("0.5Ki", "512"),
            ("1000k", "1M"),
            ("1e3", "1e3"),
            ("1E3", "1e3"),
            ("12e6", "12e6"),
            ("100e-3", "100e-3"),
            ("1E", "1E"),
            ("-1", "-1"),
            ("+5", "5"),
            (".5", "500m"),
            ("5.", "5"),
            ("1n", "1n"),
            ("0.1n", "1n"),
            ("1u", "1u"),
            ("1234567890", "1234567890"),
            ("128974848", "128974848"),
            ("129e6", "129e6"),
            ("123Mi", "123Mi"),
            ("9223372036854775807000", "9223372036854775807k"),
            ("8Ei", "9223372036854775807"),
            ("9999999999Ti", "9223372036854775807"),
            ("-8Ei", "-9223372036854775807"),
            ("1000E", "1e21"),
            ("1e25", "10e24"),
            ("1e29", "100e27"),
            ("1e2147483647", "100e27"),
            ("0.0000000001", "1n"),
            ("1e-2147483648", "1e-9"),
            ("-0.1n", "-1n"),
            ("0.1Ki", "102400m"),
            ("0.3Ki", "307200m"),
            ("1.1Ki", "1126400m"),
            ("1.00000000000000000000000000000000000000001", "1000000001n"),
            ("00000000000000000000000000000000000000000000000001", "1"),
            ("100000000000000000000000000000000000000000e-40", "10"),
            ("0.00000000000000000000000000000000000000001e41", "1"),
        ];
        for (text, expect) in cases {
            assert_eq!(Quantity::parse(text).map(|q| q.to_string()), Ok(expect.to_owned()), "for {text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "x",
            "1.1.1",
            ".",
            "+",
            "1ki",
            "1K",
            "1mi",
            "1Gib",
            "1 Gi",
            "e3",
            "1e",
            "1e1.5",
            "--1",
            "1 ",
            "Mi",
            "12x",
            "nonsense",
            "1e-",
            "1e99999999999",
        ] {
            assert_eq!(Quantity::parse(text), Err(QuantityError), "for {text:?}");
        }
    }

    #[test]
    fn amounts_compare_across_notations() {
        for (a, b) in [("1", "1000m"), ("1Ki", "1024"), ("1e3", "1k"), ("0.001", "1m")] {
            assert_eq!(Quantity::parse(a), Quantity::parse(b), "{a} and {b}");
        }
        assert!(Quantity::parse("1Gi").unwrap() > Quantity::parse("1G").unwrap());
        assert!(Quantity::parse("999m").unwrap() < Quantity::parse("1").unwrap());
    }

    #[test]
    fn counts_round_away_from_zero() {
        for (text, millis, value) in [("1", 1000, 1), ("1500m", 1500, 2), ("1n", 1, 1), ("-1500m", -1500, -2)]
        {
            let quantity = Quantity::parse(text).unwrap();
            assert_eq!((quantity.millis(), quantity.value()), (millis, value), "for {text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn the_canonical_form_reads_as_the_same_amount(text in "[+-]?[0-9]{0,22}[.]?[0-9]{1,12}([numkMGTPE]|[KMGTPE]i|e-?[0-9]{1,2})?") {
            let quantity = Quantity::parse(&text).unwrap();
            let canonical = quantity.to_string();
            proptest::prop_assert_eq!(Quantity::parse(&canonical), Ok(quantity));
            proptest::prop_assert_eq!(Quantity::parse(&canonical).unwrap().to_string(), canonical);
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = Quantity::parse(&text);
        }
    }
}
