//! Validation of enum values. The generated code reads an unknown value as the first value, which would silently change
//! the request. Pure.

use crate::error::Error;

/// The enum value of a field's number.
///
/// # Errors
/// If the number is unknown.
pub(crate) fn known<T: TryFrom<i32>>(field: &'static str, number: i32) -> Result<T, Error> {
    T::try_from(number).map_err(|_unknown| Error::invalid(field, format!("{number} is not a known value")))
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::NamespaceMode;

    use super::*;

    #[test]
    fn an_unknown_number_is_refused() {
        assert_eq!(known::<NamespaceMode>("pid", 2).expect("a member"), NamespaceMode::Node);
        assert!(known::<NamespaceMode>("pid", 4).expect_err("no member").to_string().contains("pid: 4"));
    }
}
