//! Limits on the size and depth of an encoded object.

use crate::error::{ApiError, Result};

/// Maximum bytes of an encoded object. Without it, a series of patches could grow an object beyond the limit of one
/// request.
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
    let (mut depth, mut deepest, mut in_text, mut escaped) = (0_usize, 0, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b'{' | b'[' if !in_text => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}
