//! The form of bootstrap tokens: `[a-z0-9]{6}\.[a-z0-9]{16}`.

/// Bytes of the id.
const ID_LENGTH: usize = 6;
/// Bytes of the secret.
const SECRET_LENGTH: usize = 16;

/// The parts of a bootstrap token, `id.secret`. There is no `Debug`, so that the secret is not printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BootstrapToken<'a> {
    /// The public part; the name of its Secret contains it.
    pub id: &'a str,
    /// The secret part.
    pub secret: &'a str,
}

// === impl BootstrapToken ===

impl<'a> BootstrapToken<'a> {
    /// Splits a token. `None` if the text does not have exactly the form of a token.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        let (id, secret) = text.split_once('.')?;
        let has_form = |part: &str, length: usize| {
            part.len() == length
                && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        };
        (has_form(id, ID_LENGTH) && has_form(secret, SECRET_LENGTH)).then_some(Self { id, secret })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_form_is_a_token() {
        let token = BootstrapToken::parse("abcdef.0123456789abcdef").unwrap();
        assert_eq!((token.id, token.secret), ("abcdef", "0123456789abcdef"));
        for wrong in [
            "",
            "abcdef",
            "abcdef.",
            "ABCDEF.0123456789abcdef",
            "abcdef.0123456789abcde",
            "abcdef.0123456789abcdeff",
            "abcde.0123456789abcdef",
            "abcdef.0123456789abcde.",
            "abcdé.0123456789abcdef",
        ] {
            assert!(BootstrapToken::parse(wrong).is_none(), "{wrong}");
        }
    }
}
