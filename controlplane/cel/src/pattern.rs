//! Regular expressions of Go (`regexp/syntax`) on the crate `regex`, which also takes linear time.
//!
//! The syntaxes differ: in Go `\d`, `\w`, `\s` and `\b` are ASCII, a brace that is no repetition is a plain character,
//! and classes have no set operations.

use regex::{Regex, RegexBuilder};

/// Maximum memory of a compiled expression, in bytes.
pub const MAX_BYTES: usize = 1 << 20;

/// The error of an expression that needs more memory than allowed.
pub const TOO_LARGE: &str = "expression too large";

/// Maximum nesting of an expression.
const MAX_NESTING: u32 = 100;

/// Compiles a regular expression in Go's syntax, with a limit on its size in bytes.
pub fn compile(text: &str, max_bytes: usize) -> Result<Regex, String> {
    RegexBuilder::new(&translate(text))
        .size_limit(max_bytes)
        .dfa_size_limit(MAX_BYTES)
        .nest_limit(MAX_NESTING)
        .build()
        .map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => TOO_LARGE.to_owned(),
            error => {
                error.to_string().lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
            }
        })
}

fn translate(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let mut chars = text.char_indices().peekable();
    let mut class = false;
    let mut class_start = 0;
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some((_, escaped)) => escape(escaped, class, &mut out),
                None => out.push('\\'),
            },
            '[' if !class => {
                class = true;
                out.push('[');
                if let Some((_, '^')) = chars.peek() {
                    out.push('^');
                    chars.next();
                }
                class_start = out.len();
            }
            '[' if text[at..].starts_with("[:") => out.push('['),
            '[' => out.push_str("\\["),
            ']' if class && out.len() == class_start => out.push_str("\\]"),
            ']' if class && posix_end(text, at) => out.push(']'),
            ']' => {
                class = false;
                out.push(']');
            }
            '&' | '~' | '-' if class && chars.peek().is_some_and(|(_, next)| *next == c) => {
                out.push('\\');
                out.push(c);
            }
            '{' if !class && !is_repetition(&text[at..]) => out.push_str("\\{"),
            '}' if !class && !closes_repetition(&text[..at]) => out.push_str("\\}"),
            c => out.push(c),
        }
    }
    out
}

fn escape(c: char, class: bool, out: &mut String) {
    let set = match c {
        'd' => "0-9",
        'w' => "0-9A-Za-z_",
        's' => "\\t\\n\\x0C\\r ",
        'D' => "^0-9",
        'W' => "^0-9A-Za-z_",
        'S' => "^\\t\\n\\x0C\\r ",
        'b' => return out.push_str("(?-u:\\b)"),
        'B' => return out.push_str("(?-u:\\B)"),
        c => {
            out.push('\\');
            return out.push(c);
        }
    };
    if class && !set.starts_with('^') {
        out.push_str(set);
    } else {
        out.push('[');
        out.push_str(set);
        out.push(']');
    }
}

/// Whether the bracket at `at` ends a class such as `[:alpha:]` inside a class.
fn posix_end(text: &str, at: usize) -> bool {
    text[..at].ends_with(':')
        && text[..at].rfind("[:").is_some_and(|start| {
            start + 2 < at && text[start + 2..at - 1].chars().all(|c| c.is_ascii_alphabetic() || c == '^')
        })
}

/// Whether the text begins with `{n}`, `{n,}` or `{n,m}`.
fn is_repetition(text: &str) -> bool {
    let Some(inside) = text[1..].split('}').next().filter(|inside| inside.len() + 1 < text.len()) else {
        return false;
    };
    let (low, high) = inside.split_once(',').unwrap_or((inside, ""));
    !low.is_empty() && [low, high].iter().all(|part| part.bytes().all(|byte| byte.is_ascii_digit()))
}

fn closes_repetition(before: &str) -> bool {
    before.rfind('{').is_some_and(|start| is_repetition(&format!("{}}}", &before[start..])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_of_go() {
        for (pattern, good, bad) in [
            (r"^\d+$", "12", "١٢"),
            (r"^[\w-]+$", "a-b", "é"),
            (r"^[[]$", "[", "a"),
            (r"^a{,2}$", "a{,2}", "aa"),
            (r"^a{1,2}$", "aa", "aaa"),
            (r"^[[:alpha:]]+$", "ab", "a1"),
            (r"^[a&&b]+$", "a&b", "c"),
            (r"^[]a]+$", "]a", "b"),
            (r"^\$\{x\}$", "${x}", "x"),
        ] {
            let regex = compile(pattern, MAX_BYTES).unwrap_or_else(|error| panic!("{pattern}: {error}"));
            assert!(regex.is_match(good), "{pattern} {good}");
            assert!(!regex.is_match(bad), "{pattern} {bad}");
        }
        assert!(compile("(", MAX_BYTES).is_err());
        assert!(compile("(?:a{1000}){1000}", MAX_BYTES).is_err());
    }
}
