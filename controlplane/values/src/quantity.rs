//! Quantities of API objects. Amounts and the text form are those of [`coracle_quantity`].

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

pub use coracle_quantity::{Quantity, QuantityError};

/// Reads a quantity of an API object. Blanks around it are allowed, as upstream's JSON decoder allows them.
pub fn of(quantity: &ApiQuantity) -> Result<Quantity, QuantityError> {
    Quantity::parse(quantity.0.trim())
}

/// The amount in thousandths, rounded as by [`Quantity::millis`]. 0 if the text is not a quantity: the API server
/// stores no such text.
pub fn millis_of(quantity: &ApiQuantity) -> i64 {
    of(quantity).map_or(0, Quantity::millis)
}

/// The amount in whole units, rounded as by [`Quantity::value`]. 0 if the text is not a quantity.
pub fn value_of(quantity: &ApiQuantity) -> i64 {
    of(quantity).map_or(0, Quantity::value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_of_objects_are_counted_in_thousandths_and_units() {
        let most = i64::MAX;
        let cases = [
            ("250m", 250, 1),
            ("1", 1000, 1),
            ("0.1", 100, 1),
            ("0.5", 500, 1),
            ("1.5", 1500, 2),
            ("64Mi", 67_108_864_000, 67_108_864),
            ("1.5Gi", 1_610_612_736_000, 1_610_612_736),
            ("1e3", 1_000_000, 1000),
            ("1E", most, 1_000_000_000_000_000_000),
            ("2E2", 200_000, 200),
            ("12k", 12_000_000, 12_000),
            ("100n", 1, 1),
            ("0", 0, 0),
            (" 1 ", 1000, 1),
            ("", 0, 0),
            ("12x", 0, 0),
        ];
        for (text, millis, value) in cases {
            let quantity = ApiQuantity(text.to_owned());
            assert_eq!((millis_of(&quantity), value_of(&quantity)), (millis, value), "for {text:?}");
        }
    }
}
