//! Numbers of enumerations, as clients send them. One that is no member would be read as the first one, and what was
//! asked for be dropped: it is refused. Pure.

use crate::error::Error;

/// The member that a field's number is.
///
/// # Errors
/// There is none.
pub(crate) fn known<T: TryFrom<i32>>(field: &'static str, number: i32) -> Result<T, Error> {
    T::try_from(number).map_err(|_unknown| Error::invalid(field, format!("{number} is no member")))
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::NamespaceMode;

    use super::*;

    #[test]
    fn a_number_that_is_no_member_is_refused() {
        assert_eq!(known::<NamespaceMode>("pid", 2).expect("a member"), NamespaceMode::Node);
        assert!(known::<NamespaceMode>("pid", 4).expect_err("no member").to_string().contains("pid: 4"));
    }
}
