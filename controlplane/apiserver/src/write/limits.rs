//! Limits on the size and depth of an encoded object.

use crate::error::{ApiError, Result};

/// Maximum bytes of an encoded object. Without this limit, a series of patches could grow an object beyond the limit of
/// one request.
const MAX_OBJECT: usize = 3 << 20;
/// Maximum nesting depth of an encoded object. The decoder accepts 127 levels, and `managedFields` repeats the levels
/// of the object below four levels of its own. An object that is too deep to decode would appear to have no finalizers,
/// owners or old values.
const MAX_DEPTH: usize = 120;

/// Refuses an object that is too large or too deep.
pub(super) fn check(encoded: &[u8]) -> Result<()> {
    if encoded.len() > MAX_OBJECT {
        return Err(ApiError::too_large());
    }
    if depth(encoded) > MAX_DEPTH {
        let why = format!("the object with its managedFields is nested more than {MAX_DEPTH} levels deep");
        return Err(ApiError::entity_too_large(why));
    }
    Ok(())
}

/// The depth of an encoded object.
fn depth(json: &[u8]) -> usize {
    let (mut depth, mut deepest, mut rest) = (0_usize, 0, json);
    while let Some((byte, after)) = rest.split_first() {
        rest = match byte {
            b'"' => after_text(after),
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
                after
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                after
            }
            _ => after,
        };
    }
    deepest
}

/// The bytes behind the end of a text. Most bytes of an object are in texts, so this loop is small.
fn after_text(mut rest: &[u8]) -> &[u8] {
    while let Some(at) = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')) {
        let is_end = rest.get(at) == Some(&b'"');
        // A backslash escapes the next byte.
        let taken = if is_end { at + 1 } else { at + 2 };
        rest = rest.get(taken..).unwrap_or_default();
        if is_end {
            return rest;
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_texts_are_no_levels() {
        for (json, expect) in [
            (r#"{}"#, 1),
            (r#"[[],{"a":[1]}]"#, 3),
            (r#"{"[[{":"]]}"}"#, 1),
            (r#"{"a\"[[":["\\",[]]}"#, 3),
            (r#"{"a":"\\\"[","b":[]}"#, 2),
            (r#"{"a":"[["#, 1),
            (r#"{"a":"\"#, 1),
            ("", 0),
        ] {
            assert_eq!(depth(json.as_bytes()), expect, "{json}");
        }
        for (levels, is_accepted) in [(MAX_DEPTH, true), (MAX_DEPTH + 1, false)] {
            let nested = format!("{}{}", "[".repeat(levels), "]".repeat(levels));
            assert_eq!(check(nested.as_bytes()).is_ok(), is_accepted, "{levels}");
        }
    }
}
