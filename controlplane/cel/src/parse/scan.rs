//! Limits that are checked before the parser reads an expression. Source of the parser's limits: its code recurses for each
//! bracket and operator, and a panic in it would end the program.

/// Maximum depth of brackets.
const MAX_BRACKETS: usize = 32;

/// Maximum number of `!`, `-`, `?` and `:` outside texts. The parser recurses for each of them in a row.
const MAX_RECURSIVE: usize = 512;

/// Maximum length of a number. The grammar has no limit.
const MAX_NUMBER: usize = 64;

/// Checks the depth of brackets and the number of operators that the parser recurses for.
pub(super) fn check(source: &str) -> Result<(), String> {
    let bytes = source.as_bytes();
    let (mut at, mut depth, mut recursive, mut number) = (0, 0_usize, 0_usize, 0_usize);
    while let Some(byte) = bytes.get(at) {
        number = if byte.is_ascii_alphanumeric() || *byte == b'.' { number + 1 } else { 0 };
        let in_number = bytes.get(at + 1 - number.max(1)).is_some_and(u8::is_ascii_digit);
        match byte {
            b'"' | b'\'' => at = end_of_text(bytes, at),
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at += bytes.iter().skip(at).position(|byte| *byte == b'\n').unwrap_or(bytes.len());
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            b'!' | b'-' | b'?' | b':' => recursive += 1,
            0 => return Err("expression contains the character NUL".to_owned()),
            _ => {}
        }
        if depth > MAX_BRACKETS {
            return Err(format!("expression has brackets more than {MAX_BRACKETS} levels deep"));
        }
        if recursive > MAX_RECURSIVE {
            return Err(format!("expression has more than {MAX_RECURSIVE} operators of the kinds ! - ? :"));
        }
        if in_number && number > MAX_NUMBER {
            return Err(format!("number is longer than {MAX_NUMBER} characters"));
        }
        at += 1;
    }
    Ok(())
}

/// The last byte of a text that begins here. Without an end it is the last byte of the expression.
fn end_of_text(bytes: &[u8], start: usize) -> usize {
    let quote = bytes.get(start).copied().unwrap_or_default();
    let triple = bytes.get(start..start + 3).is_some_and(|three| three.iter().all(|byte| *byte == quote));
    let raw = start
        .checked_sub(1)
        .and_then(|before| bytes.get(before))
        .is_some_and(|byte| matches!(byte, b'r' | b'R'))
        || start
            .checked_sub(2)
            .and_then(|before| bytes.get(before))
            .is_some_and(|byte| matches!(byte, b'r' | b'R'))
            && start
                .checked_sub(1)
                .and_then(|before| bytes.get(before))
                .is_some_and(|byte| matches!(byte, b'b' | b'B'));
    let mut at = start + if triple { 3 } else { 1 };
    while let Some(byte) = bytes.get(at) {
        let closes = |length: usize| {
            bytes.get(at..at + length).is_some_and(|found| found.iter().all(|byte| *byte == quote))
        };
        if *byte == b'\\' && !raw {
            at += 1;
        } else if triple && closes(3) {
            return at + 2;
        } else if !triple && closes(1) {
            return at;
        }
        at += 1;
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_counts_outside_texts_and_comments() {
        assert!(check(&"(".repeat(MAX_BRACKETS)).is_ok());
        assert!(check(&"(".repeat(MAX_BRACKETS + 1)).is_err());
        assert!(check(&format!("'{}' + \"\"\"{}\"\"\"", "(".repeat(99), "[".repeat(99))).is_ok());
        assert!(check(&format!("'\\'{}'", "(".repeat(99))).is_ok());
        assert!(check(&format!("r'\\' + {}", "(".repeat(99))).is_err());
        assert!(check(&format!("1 // {}\n+ 2", "(".repeat(99))).is_ok());
        assert!(check(&"!".repeat(MAX_RECURSIVE + 1)).is_err());
        assert!(check(&"1".repeat(MAX_NUMBER + 1)).is_err());
        assert!(check(&"a".repeat(MAX_NUMBER + 1)).is_ok());
    }
}
