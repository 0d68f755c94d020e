//! Kubernetes quantities: `500m`, `1Gi`, `1e3`.

/// An amount, exact to a nano unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Quantity {
    nanos: i128,
}

/// Why a text is no quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
pub struct QuantityError;

impl Quantity {
    /// Parses any of the forms.
    pub fn parse(text: &str) -> Result<Quantity, QuantityError> {
        text.parse::<i128>().map(|n| Quantity { nanos: n * 1_000_000_000 }).map_err(|_e| QuantityError)
    }

    /// In thousandths, rounded up, as CPU is counted.
    pub fn millis(self) -> i64 {
        i64::try_from(self.nanos / 1_000_000).unwrap_or(i64::MAX)
    }

    /// In whole units, rounded up, as bytes are counted.
    pub fn value(self) -> i64 {
        i64::try_from(self.nanos / 1_000_000_000).unwrap_or(i64::MAX)
    }
}
