//! Kubernetes quantities: `500m`, `1Gi`, `1e3`. Exact to a nano unit; texts are brought into canonical form.

use std::cmp::Ordering;
use std::fmt;

const NANO: i128 = 1_000_000_000;
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// An amount. Equality and order look at the amount only, not at how it is written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quantity {
    nanos: i128,
    form: Form,
}

/// How a quantity is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    #[default]
    Decimal,
    Binary,
    Exponent,
}

/// Why a text is no quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
pub struct QuantityError;

// === impl Quantity ===

impl Quantity {
    /// Nothing.
    pub const ZERO: Quantity = Quantity { nanos: 0, form: Form::Decimal };

    /// Parses any of the forms; what is finer than a nano unit is rounded up, what is too large is capped.
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
        let (form, scale) = scale(suffix)?;
        let nanos = amount(whole, fraction, scale);
        Ok(Quantity { nanos: if negative { -nanos } else { nanos }, form })
    }

    /// A whole number.
    pub fn from_units(units: i64) -> Quantity {
        Quantity { nanos: i128::from(units) * NANO, form: Form::Decimal }
    }

    /// A number of thousandths.
    pub fn from_millis(millis: i64) -> Quantity {
        Quantity { nanos: i128::from(millis) * (NANO / 1000), form: Form::Decimal }
    }

    /// A whole number written with `Ki`, `Mi`, … where it can be.
    pub fn from_bytes(bytes: i64) -> Quantity {
        Quantity { nanos: i128::from(bytes) * NANO, form: Form::Binary }
    }

    /// In thousandths, rounded up, as CPU is counted.
    pub fn millis(self) -> i64 {
        saturate(div_up(self.nanos, NANO / 1000))
    }

    /// In whole units, rounded up, as bytes are counted.
    pub fn value(self) -> i64 {
        saturate(div_up(self.nanos, NANO))
    }

    /// Whether it is a whole number.
    pub fn is_integer(self) -> bool {
        self.nanos % NANO == 0
    }

    /// -1, 0 or 1.
    pub fn signum(self) -> i32 {
        i32::try_from(self.nanos.signum()).unwrap_or(0)
    }

    /// The sum, written as the left one.
    #[must_use]
    pub fn plus(self, other: Quantity) -> Quantity {
        Quantity { nanos: self.nanos.saturating_add(other.nanos), form: self.form }
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
    /// Canonical form: no fraction, the largest suffix that leaves a whole number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let binary = self.form == Form::Binary && self.is_integer() && self.nanos.abs() >= 1024 * NANO;
        if binary {
            let (mut number, mut step) = (self.nanos / NANO, 0);
            while number % 1024 == 0 && step + 1 < BINARY.len() {
                number /= 1024;
                step += 1;
            }
            return write!(f, "{number}{}", BINARY[step]);
        }
        let (mut number, mut step) = (self.nanos, 0);
        while number % 1000 == 0 && step + 1 < DECIMAL.len() {
            number /= 1000;
            step += 1;
        }
        match (self.form, DECIMAL[step]) {
            (Form::Exponent, (_, exponent)) if exponent != 0 => write!(f, "{number}e{exponent}"),
            (_, (suffix, _)) => write!(f, "{number}{suffix}"),
        }
    }
}

/// What a suffix multiplies by.
#[derive(Clone, Copy)]
enum Scale {
    Ten(i32),
    Two(u32),
}

fn scale(suffix: &str) -> Result<(Form, Scale), QuantityError> {
    if let Some((_, exponent)) = DECIMAL.iter().find(|(name, _)| *name == suffix) {
        return Ok((Form::Decimal, Scale::Ten(*exponent)));
    }
    if let Some(step) = BINARY.iter().position(|name| *name == suffix) {
        return Ok((Form::Binary, Scale::Two(u32::try_from(step * 10).unwrap_or(0))));
    }
    let digits = suffix.strip_prefix(['e', 'E']).ok_or(QuantityError)?;
    let exponent = digits.parse::<i32>().map_err(|_error| QuantityError)?;
    Ok((Form::Exponent, Scale::Ten(exponent)))
}

/// Digits and scale to nanos, rounding up, capped at the largest 64-bit number of units.
fn amount(whole: &str, fraction: &str, scale: Scale) -> i128 {
    let cap = i128::from(i64::MAX) * NANO;
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return 0;
    }
    let Ok(mut number) = digits.parse::<i128>() else { return cap };
    let mut exponent = 9 - i64::try_from(fraction.len()).unwrap_or(i64::MAX / 2);
    match scale {
        Scale::Ten(power) => exponent += i64::from(power),
        Scale::Two(power) => match number.checked_mul(1i128 << power) {
            Some(product) => number = product,
            None => return cap,
        },
    }
    while exponent > 0 {
        let Some(next) = number.checked_mul(10) else { return cap };
        if next > cap {
            return cap;
        }
        number = next;
        exponent -= 1;
    }
    if exponent < -40 {
        return 1;
    }
    let mut inexact = false;
    while exponent < 0 {
        inexact |= number % 10 != 0;
        number /= 10;
        exponent += 1;
    }
    (number + i128::from(inexact)).min(cap)
}

fn div_up(number: i128, by: i128) -> i128 {
    number.div_euclid(by) + i128::from(number.rem_euclid(by) != 0)
}

fn saturate(number: i128) -> i64 {
    i64::try_from(number).unwrap_or(if number < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_become_canonical() {
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
            ("9223372036854775807000", "9223372036854775807"),
        ];
        for (text, expect) in cases {
            assert_eq!(Quantity::parse(text).map(|q| q.to_string()), Ok(expect.to_owned()), "for {text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in
            ["", "x", "1.1.1", ".", "+", "1ki", "1K", "1mi", "1Gib", "1 Gi", "e3", "1e", "1e1.5", "--1", "1 "]
        {
            assert_eq!(Quantity::parse(text), Err(QuantityError), "for {text:?}");
        }
    }

    #[test]
    fn amounts_compare_across_forms() {
        for (a, b) in [("1", "1000m"), ("1Ki", "1024"), ("1e3", "1k"), ("0.001", "1m")] {
            assert_eq!(Quantity::parse(a), Quantity::parse(b), "{a} and {b}");
        }
        assert!(Quantity::parse("1Gi").unwrap() > Quantity::parse("1G").unwrap());
        assert!(Quantity::parse("999m").unwrap() < Quantity::parse("1").unwrap());
    }

    #[test]
    fn counts_round_up() {
        for (text, millis, value) in [("1", 1000, 1), ("1500m", 1500, 2), ("1n", 1, 1), ("-1500m", -1500, -1)]
        {
            let quantity = Quantity::parse(text).unwrap();
            assert_eq!((quantity.millis(), quantity.value()), (millis, value), "for {text}");
        }
    }
}
