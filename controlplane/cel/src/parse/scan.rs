//! Limits that are checked before the parser reads an expression. The parser's code recurses for each bracket and
//! operator, and a panic or a stack overflow in it would end the program.
//!
//! The tokens are found as the lexer finds them (`CEL.g4`). The lexer skips invalid tokens and continues after them, so
//! the limits would not apply to the rest. Therefore an expression with an invalid token is refused here.

/// Maximum depth of brackets.
const MAX_BRACKETS: usize = 32;

/// Maximum number of the operators `!`, `-`, `?` and `:`. The parser recurses for each operator of a sequence.
const MAX_RECURSIVE: usize = 512;

/// Maximum length of a number. The grammar has no limit.
const MAX_NUMBER: usize = 64;

/// Maximum number of characters of an invalid token in an error.
const MAX_SHOWN: usize = 20;

/// Checks the tokens, the depth of brackets, and the number of operators that the parser recurses for.
pub(super) fn check(source: &str) -> Result<(), String> {
    let bytes = source.as_bytes();
    let (mut at, mut depth, mut recursive) = (0, 0_usize, 0_usize);
    while let Some(byte) = bytes.get(at) {
        let rest = bytes.get(at..).unwrap_or_default();
        let length = token_length(rest).ok_or_else(|| invalid_token(source, at))?;
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            b'!' | b'-' | b'?' | b':' => recursive += 1,
            b'0'..=b'9' if run(rest, |byte| byte.is_ascii_alphanumeric() || *byte == b'.') > MAX_NUMBER => {
                return Err(format!("number is longer than {MAX_NUMBER} characters"));
            }
            _ => {}
        }
        if depth > MAX_BRACKETS {
            return Err(format!("expression has brackets more than {MAX_BRACKETS} levels deep"));
        }
        if recursive > MAX_RECURSIVE {
            return Err(format!("expression has more than {MAX_RECURSIVE} operators of the kinds ! - ? :"));
        }
        at += length;
    }
    Ok(())
}

/// Length of the token, comment or white space at the start. A number may count as several tokens. `None` if there is
/// no valid token.
fn token_length(source: &[u8]) -> Option<usize> {
    let word = run(source, |byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    if word > 0 {
        let (word, rest) = source.split_at(word);
        let is_text = matches!(rest, [b'"' | b'\'', ..]);
        let text = match word {
            _ if !is_text => return Some(word.len()),
            [b'r' | b'R'] | [b'b' | b'B', b'r' | b'R'] => text_length(rest, true)?,
            [b'b' | b'B'] => text_length(rest, false)?,
            // A number before a quote, such as `1b"`. The lexer may read only a part of the word as a number, and the
            // rest as the prefix of a text.
            [b'0'..=b'9', ..] => return None,
            // The word is an identifier, and the text is the next token.
            _ => 0,
        };
        return Some(word.len() + text);
    }
    match source {
        [b'/', b'/', ..] => Some(run(source, |byte| *byte != b'\n')),
        [b'"' | b'\'', ..] => text_length(source, false),
        [b'`', name @ ..] => {
            let length = run(name, |byte| {
                byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-' | b'/' | b' ')
            });
            (length > 0 && name.get(length) == Some(&b'`')).then_some(length + 2)
        }
        [b'&', b'&', ..] | [b'|', b'|', ..] | [b'=' | b'!' | b'<' | b'>', b'=', ..] => Some(2),
        [byte, ..] => b" \t\r\n\x0c()[]{}.,?:<>!+-*/%".contains(byte).then_some(1),
        [] => None,
    }
}

/// Number of bytes at the start that have a property.
fn run(source: &[u8], has: impl Fn(&u8) -> bool) -> usize {
    source.iter().take_while(|byte| has(byte)).count()
}

/// Length of a string or bytes literal, from its opening quotes to its closing quotes. `None` if it is invalid.
fn text_length(source: &[u8], is_raw: bool) -> Option<usize> {
    let quote = *source.first()?;
    let quotes = if source.starts_with(&[quote; 3]) { 3 } else { 1 };
    let mut at = quotes;
    loop {
        let rest = source.get(at..)?;
        at += match rest {
            [byte, ..] if *byte == quote && rest.starts_with(&[quote; 3][..quotes]) => {
                return Some(at + quotes);
            }
            [b'\\', escape @ ..] if !is_raw => 1 + escape_length(escape)?,
            [b'\r' | b'\n', ..] if quotes == 1 => return None,
            [_, ..] => 1,
            [] => return None,
        };
    }
}

/// Length of an escape sequence without its backslash. `None` if it is invalid.
fn escape_length(source: &[u8]) -> Option<usize> {
    let digits = |count: usize, is_digit: fn(&u8) -> bool| {
        source.get(1..=count).filter(|digits| digits.iter().all(is_digit)).map(|_digits| 1 + count)
    };
    match source.first()? {
        b'a' | b'b' | b'f' | b'n' | b'r' | b't' | b'v' | b'"' | b'\'' | b'\\' | b'?' | b'`' => Some(1),
        b'x' | b'X' => digits(2, u8::is_ascii_hexdigit),
        b'u' => digits(4, u8::is_ascii_hexdigit),
        b'U' => digits(8, u8::is_ascii_hexdigit),
        b'0'..=b'3' => digits(2, |digit| matches!(digit, b'0'..=b'7')),
        _ => None,
    }
}

/// The error of an invalid token, in the form of the parser's errors.
fn invalid_token(source: &str, at: usize) -> String {
    let (before, rest) = source.split_at_checked(at).unwrap_or((source, ""));
    let line = 1 + before.matches('\n').count();
    let column = 1 + before.chars().rev().take_while(|character| *character != '\n').count();
    let shown: String = rest.chars().take(MAX_SHOWN).collect();
    format!("ERROR: <input>:{line}:{column}: Syntax error: token recognition error at: {shown:?}")
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

    #[test]
    fn depth_counts_after_an_apparent_raw_text_or_comment() {
        for start in [r"rb'\''", r"ar'\''", r"_r'\''", "a.`//`", "x in'//'"] {
            let error = check(&format!("{start} + {} '", "(".repeat(MAX_BRACKETS + 1))).unwrap_err();
            assert!(error.contains("brackets"), "{start}: {error}");
        }
    }

    #[test]
    fn invalid_tokens_are_refused() {
        for valid in [
            "a != b && c <= d || !(e >= -1.5e+10) ? 0x1F : 2u % .5 // \u{e9} '",
            "'' + \"\\\"\\u00e9\\x41\\101\" + '''a'b\n''' + r'\\' + R\"\"\"\\\n\"\"\" + '\u{e9}'",
            "b'a' == Br'\\' && Object.spec{`a-b/c.d`: [1, 2].exists(x, x in {'a': 1}), ?b: optional.none()}",
        ] {
            assert_eq!(check(valid), Ok(()), "{valid}");
        }
        for invalid in [
            "'",
            "'''",
            "'''a''",
            "'a\nb'",
            "'\\q'",
            "'\\400'",
            "\"\\u12\"",
            "'\\",
            "r'\n'",
            "b\"",
            "a & b",
            "a | b",
            "a = b",
            "a @ b",
            "\u{e9}",
            "``",
            "`a",
            "`'",
            "1r'\\''",
            "0xfb'\\''",
            "\0",
        ] {
            let error = check(&format!("x +\n {invalid}")).unwrap_err();
            assert!(error.starts_with("ERROR: <input>:2:"), "{error}");
            assert!(error.contains(": Syntax error: token recognition error at: "), "{error}");
        }
    }
}
