//! Regular expressions of Go (`regexp/syntax`), translated for the crate `regex`. Both match in linear time.
//!
//! The syntaxes differ. In Go `\d`, `\w`, `\s` and `\b` are ASCII, a brace without a repetition is a plain character,
//! and classes have no set operations.

use regex::{Regex, RegexBuilder};
use regex_syntax::ast::{
    Ast, ClassSetItem, ClassUnicode, ClassUnicodeKind, Flag, Flags, Visitor, parse, visit,
};

/// Maximum memory of a compiled expression, in bytes.
pub const MAX_BYTES: usize = 1 << 20;

/// The error of an expression that needs more memory than allowed.
pub const TOO_LARGE: &str = "expression too large";

/// Maximum nesting of an expression.
const MAX_NESTING: u32 = 100;

/// Maximum bytes of the text of an expression. Parsing takes up to a hundred times this memory, before the limit of the
/// compiled form applies. Usually the compiled form of a longer text exceeds [`MAX_BYTES`].
const MAX_TEXT: usize = 32 << 10;

/// Maximum number of characters whose other case the crate looks up for one expression. The look-ups take about 0.1 s.
const MAX_FOLDED: u64 = 4 << 20;

/// Number of these look-ups for a class such as `\pL`.
const CLASS_FOLDED: u64 = 128 << 10;

/// Compiles a regular expression in Go's syntax, with a limit on its size in bytes.
pub fn compile(text: &str, max_bytes: usize) -> Result<Regex, String> {
    if text.len() > MAX_TEXT || folded(text) > MAX_FOLDED {
        return Err(TOO_LARGE.to_owned());
    }
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

/// Whether the syntax of a regular expression of Go is valid. Names of Unicode classes and sizes are not checked: that
/// takes as long as compiling.
pub fn is_valid(text: &str) -> bool {
    let mut parser = parse::ParserBuilder::new();
    text.len() <= MAX_TEXT
        && parser
            .nest_limit(MAX_NESTING)
            .build()
            .parse(&translate(text))
            .is_ok_and(|ast| !visit(&ast, Repeated(false)).unwrap_or_else(|never| match never {}))
}

/// Finds a repetition of a repetition, such as `x++`. Go requires a group between them: `(x+)+`.
struct Repeated(bool);

impl Visitor for Repeated {
    type Output = bool;
    type Err = std::convert::Infallible;

    fn finish(self) -> Result<bool, Self::Err> {
        Ok(self.0)
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), Self::Err> {
        if let Ast::Repetition(repetition) = ast {
            self.0 |= matches!(*repetition.ast, Ast::Repetition(_));
        }
        Ok(())
    }
}

/// Number of characters that the crate looks up when it compiles the expression, to fold the case of its classes. A
/// short range such as `[!-\u{10ffff}]` has a million characters. 0 for a case-sensitive or invalid expression.
pub fn folded(text: &str) -> u64 {
    if text.len() > MAX_TEXT || !text.contains("(?") {
        return 0;
    }
    let mut parser = parse::ParserBuilder::new();
    match parser.nest_limit(MAX_NESTING).build().parse(&translate(text)) {
        Ok(ast) => visit(&ast, Folded::default()).unwrap_or_else(|never| match never {}),
        // The expression does not compile.
        Err(_) => 0,
    }
}

/// Counts the characters of the classes of an expression.
#[derive(Default)]
struct Folded {
    characters: u64,
    ignores_case: bool,
}

impl Folded {
    fn class(&mut self, class: &ClassUnicode) {
        let name = match &class.kind {
            ClassUnicodeKind::OneLetter(_) => "",
            ClassUnicodeKind::Named(name) | ClassUnicodeKind::NamedValue { value: name, .. } => name,
        };
        // In the name of a class, the crate ignores case, some signs and a prefix `is`.
        let name: String =
            name.chars().filter(char::is_ascii_alphabetic).map(|c| c.to_ascii_lowercase()).collect();
        let is_all = name.ends_with("any") || name.ends_with("assigned");
        self.characters += if is_all { u64::from(u32::from(char::MAX)) } else { CLASS_FOLDED };
    }

    fn flags(&mut self, flags: &Flags) {
        self.ignores_case |= flags.flag_state(Flag::CaseInsensitive) == Some(true);
    }
}

impl Visitor for Folded {
    type Output = u64;
    type Err = std::convert::Infallible;

    fn finish(self) -> Result<u64, Self::Err> {
        Ok(if self.ignores_case { self.characters } else { 0 })
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), Self::Err> {
        match ast {
            Ast::Flags(set) => self.flags(&set.flags),
            Ast::Group(group) => group.flags().into_iter().for_each(|flags| self.flags(flags)),
            Ast::ClassUnicode(class) => self.class(class),
            _ => {}
        }
        Ok(())
    }

    fn visit_class_set_item_pre(&mut self, item: &ClassSetItem) -> Result<(), Self::Err> {
        match item {
            ClassSetItem::Range(range) => {
                let [start, end] = [range.start.c, range.end.c].map(|c| u64::from(u32::from(c)));
                self.characters += end.saturating_sub(start);
            }
            ClassSetItem::Unicode(class) => self.class(class),
            // A negated class inside a class contains nearly all characters, and the outer class folds all of them
            // again.
            ClassSetItem::Bracketed(inner) if inner.negated => {
                self.characters += u64::from(u32::from(char::MAX))
            }
            ClassSetItem::Ascii(class) if class.negated => self.characters += u64::from(u32::from(char::MAX)),
            _ => {}
        }
        Ok(())
    }
}

fn translate(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    let mut chars = text.char_indices().peekable();
    let mut class = false;
    let mut class_start = 0;
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => match chars.next() {
                // A name or a number in braces.
                Some((start, 'p' | 'P' | 'x')) if text[start + 1..].starts_with('{') => {
                    let end = text[start..].find('}').map_or(text.len(), |end| start + end + 1);
                    out.push('\\');
                    out.push_str(&text[start..end]);
                    while chars.next_if(|(at, _)| *at < end).is_some() {}
                }
                // Plain text until `\E`.
                Some((start, 'Q')) if !class => {
                    let literal = text[start + 1..].split("\\E").next().unwrap_or_default();
                    out.push_str(&regex_syntax::escape(literal));
                    let end = start + 1 + literal.len() + 2;
                    while chars.next_if(|(at, _)| *at < end).is_some() {}
                }
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
        // The crate reads `\<` and `\>` as the start and the end of a word. In Go they are plain characters.
        '<' | '>' => return out.push(c),
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
    fn expressions_match_as_in_go() {
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
            (r"^\<a[\>]$", "<a>", "a"),
            (r"^\Qa.(*\Eb+$", "a.(*bb", "axb"),
            (r"^\Qa+", "a+", "aa"),
            (r"^\p{Greek}\x{3B2}$", "αβ", "ab"),
            (r"^[\P{Greek}]{2}$", "ab", "αb"),
        ] {
            let regex = compile(pattern, MAX_BYTES).unwrap_or_else(|error| panic!("{pattern}: {error}"));
            assert!(regex.is_match(good), "{pattern} {good}");
            assert!(!regex.is_match(bad), "{pattern} {bad}");
        }
        assert!(compile("(", MAX_BYTES).is_err());
        assert!(!is_valid("(") && !is_valid("x++") && !is_valid("x{2}*"));
        assert!(is_valid("(?:x+)+") && is_valid("x+?") && is_valid("x??") && is_valid(r"^\d{1,2}$"));
        assert!(compile("(?:a{1000}){1000}", MAX_BYTES).is_err());
    }

    #[test]
    fn folding_the_case_of_wide_classes_is_limited() {
        let many = |class: &str, number: usize| format!("(?i)^{}$", class.repeat(number));
        let negated = [r"[\Da]", "[[:^digit:]a]"];
        let wide = ["[!-\u{10ffff}]", r"[\x{0}-\x{10FFFF}]", r"\p{any}", r"\p{Is_Any}", r"[\pL\pN\PL]"];
        for class in wide.into_iter().chain(negated) {
            assert!(folded(&many(class, 1)) > 0);
            assert_eq!(compile(&many(class, 1000), MAX_BYTES).unwrap_err(), TOO_LARGE, "{class}");
        }
        assert_eq!(
            compile(&format!("a(?i:{})", "[!-\u{10ffff}]".repeat(9)), MAX_BYTES).unwrap_err(),
            TOO_LARGE
        );
        assert!(compile("[!-\u{10ffff}]", MAX_BYTES).is_ok());
        let uuid = "(?i)^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$";
        assert!(compile(uuid, MAX_BYTES).is_ok() && folded(uuid) < 100);
        assert_eq!((folded("^[a-z]$"), folded(r"(?i)\p{is a_ny}")), (0, u64::from(u32::from(char::MAX))));
        assert_eq!(compile(&"(?i)".repeat(MAX_TEXT), MAX_BYTES).unwrap_err(), TOO_LARGE);
    }
}
