//! Resource quantities as integers.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The quantity in units, rounded up; 0 if it cannot be read (the server does not let such in).
pub(crate) fn units(quantity: &Quantity) -> i64 {
    scaled(&quantity.0, 1)
}

/// The quantity in thousandths, rounded up.
pub(crate) fn milli(quantity: &Quantity) -> i64 {
    scaled(&quantity.0, 1000)
}

fn scaled(text: &str, by: i128) -> i64 {
    parse(text)
        .and_then(|(number, divisor)| Some((number.checked_mul(by)?, divisor)))
        .map(|(number, divisor)| number.div_euclid(divisor) + i128::from(number.rem_euclid(divisor) != 0))
        .and_then(|value| i64::try_from(value).ok())
        .unwrap_or_default()
}

/// The quantity as a fraction.
fn parse(text: &str) -> Option<(i128, i128)> {
    let text = text.trim();
    let end =
        text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-'))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    let mut numerator: i128 = digits.parse().ok()?;
    let mut divisor = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let (up, down) = multiplier(suffix)?;
    numerator = numerator.checked_mul(up)?;
    divisor = divisor.checked_mul(down)?;
    Some((numerator, divisor))
}

fn multiplier(suffix: &str) -> Option<(i128, i128)> {
    let binary = |power: u32| Some((1024_i128.pow(power), 1));
    let decimal = |power: u32| Some((1000_i128.pow(power), 1));
    match suffix {
        "" => Some((1, 1)),
        "n" => Some((1, 1_000_000_000)),
        "u" => Some((1, 1_000_000)),
        "m" => Some((1, 1000)),
        "k" => decimal(1),
        "M" => decimal(2),
        "G" => decimal(3),
        "T" => decimal(4),
        "P" => decimal(5),
        "E" => decimal(6),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let size = 10_i128.checked_pow(power.unsigned_abs())?;
            Some(if power < 0 { (1, size) } else { (size, 1) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_in_every_notation_and_rounded_up() {
        let cases = [
            ("1", 1, 1000),
            ("100m", 1, 100),
            ("0.5", 1, 500),
            ("1.5Gi", 1_610_612_736, 1_610_612_736_000),
            ("128Mi", 134_217_728, 134_217_728_000),
            ("2k", 2000, 2_000_000),
            ("1e3", 1000, 1_000_000),
            ("1E", 1_000_000_000_000_000_000, 0),
            ("100n", 1, 1),
            ("nonsense", 0, 0),
        ];
        for (text, in_units, in_milli) in cases {
            let quantity = Quantity(text.to_owned());
            assert_eq!(units(&quantity), in_units, "{text}");
            assert_eq!(milli(&quantity), in_milli, "{text}");
        }
    }
}
