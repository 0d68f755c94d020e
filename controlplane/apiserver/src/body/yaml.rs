//! YAML bodies, with additional limits on time (nesting) and memory (aliases).

use std::{
    cell::{Cell, RefCell},
    fmt,
};

use coracle_kinds::schema::{self, Parsed, TreePath};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{ApiError, Result};

/// Maximum [`steps`] of a document. A step takes up to 10 ns, so a document takes at most 0.2 s. The largest known
/// definition of a custom resource (Prometheus, 830 kB) has a third of these steps.
const MAX_STEPS: usize = 1 << 24;
/// Maximum [`steps`] of a document that is parsed on an async worker: a few milliseconds.
const MAX_INLINE_STEPS: usize = 1 << 18;
/// Bytes to which aliases may expand even a very short document.
const MIN_EXPANSION: usize = 64 << 10;

/// Maximum number of recorded duplicate keys.
const MAX_DUPLICATES: usize = 100;

/// Parses YAML. A JSON document is parsed as JSON. The caller runs this outside of the async workers if the document
/// [is slow](is_slow).
///
/// Duplicate keys are recorded in document order. Unknown fields are reported in alphabetical order, as upstream, which
/// converts the document to JSON with sorted keys.
pub(crate) fn parse(bytes: &[u8]) -> Result<Parsed> {
    if bytes.trim_ascii_start().first() == Some(&b'{')
        && let Ok(parsed) = schema::parse_json(bytes)
    {
        return Ok(parsed);
    }
    if steps(bytes) > MAX_STEPS {
        return Err(ApiError::entity_too_large(
            "a YAML document of this size has too many flow collections ([ and {); send it as JSON",
        ));
    }
    parse_tree(bytes)
}

/// Upper bound for the steps of the parser: the sum over all tokens of the flow collections before the token. For each
/// token the parser inspects all open flow collections. Source: `yaml_parser_fetch_more_tokens` of libyaml.
///
/// Brackets in texts count as well. Only the parser itself can distinguish them from brackets of flow collections, so
/// the exact depth is not known before a document is parsed.
fn steps(bytes: &[u8]) -> usize {
    let mut opened = 0_usize;
    bytes.iter().filter(|byte| may_begin_token(**byte)).fold(0_usize, |steps, byte| {
        opened += usize::from(matches!(byte, b'[' | b'{'));
        steps.saturating_add(opened)
    })
}

/// Whether a token may begin at a byte, or after the byte and blanks. No token begins elsewhere, because two plain
/// scalars have an indicator or a line break between them. The bytes outside of ASCII are the first bytes of the line
/// breaks U+0085, U+2028 and U+2029, and of a byte order mark.
fn may_begin_token(byte: u8) -> bool {
    let is_indicator = matches!(
        byte,
        b'[' | b']'
            | b'{'
            | b'}'
            | b','
            | b':'
            | b'?'
            | b'-'
            | b'*'
            | b'&'
            | b'!'
            | b'|'
            | b'>'
            | b'\''
            | b'"'
    );
    is_indicator || matches!(byte, b'\n' | b'\r' | 0xC2 | 0xE2 | 0xEF)
}

/// Whether a document may take so long that it must not be parsed on an async worker. The caller has checked that the
/// document is short, because this function takes as long as the parsing of JSON.
pub(crate) fn is_slow(bytes: &[u8]) -> bool {
    steps(bytes) > MAX_INLINE_STEPS && !is_json(bytes)
}

/// Whether a document needs no YAML parser: [`parse`] reads it as JSON, and [`first_duplicate`] is not called, because
/// there is no duplicate key. Only [`schema::parse_json`] decides this. A parser that accepts more documents, such as a
/// parser that ignores the values, would let YAML documents pass.
fn is_json(bytes: &[u8]) -> bool {
    let parsed = bytes.trim_ascii_start().starts_with(b"{").then(|| schema::parse_json(bytes));
    matches!(parsed, Some(Ok(parsed)) if parsed.duplicates.is_empty())
}

fn parse_tree(bytes: &[u8]) -> Result<Parsed> {
    let invalid = |error: serde_yaml_ng::Error| {
        ApiError::bad_request(format!("error converting YAML to JSON: {error}"))
    };
    let text = std::str::from_utf8(bytes).map_err(|error| ApiError::bad_request(error.to_string()))?;
    let left = Cell::new(expansion(bytes));
    let document = serde_yaml_ng::Deserializer::from_str(text);
    let duplicates = RefCell::new(Vec::new());
    let tree = Tree { text, left: &left, duplicates: &duplicates, path: &TreePath::Root, only_first: false };
    let value = tree.deserialize(document).map_err(invalid)?;
    Ok(Parsed { value, duplicates: duplicates.into_inner(), keys: Vec::new() })
}

/// The first duplicate key of a document that [`parse`] has accepted, with its line. It has the format of upstream's
/// parser: `line 9: key "foo" already set in map`. It takes as long as [`parse`].
pub(crate) fn first_duplicate(bytes: &[u8]) -> Option<String> {
    let left = Cell::new(expansion(bytes));
    let duplicates = RefCell::new(Vec::new());
    let text = std::str::from_utf8(bytes).ok()?;
    let tree = Tree { text, left: &left, duplicates: &duplicates, path: &TreePath::Root, only_first: true };
    let document = serde_yaml_ng::Deserializer::from_str(text);
    let error = tree.deserialize(document).err()?;
    let key = duplicates.borrow_mut().pop()?;
    let line = error.location().map_or(0, |place| place.line());
    Some(format!("line {line}: key {key:?} already set in map"))
}

/// Maximum bytes to which aliases may expand a document.
fn expansion(bytes: &[u8]) -> usize {
    bytes.len().saturating_mul(2).max(MIN_EXPANSION)
}

/// Reads a tree. The total size of its nodes and texts is limited, because aliases can repeat nodes and texts.
#[derive(Clone, Copy)]
struct Tree<'a> {
    /// The document.
    text: &'a str,
    left: &'a Cell<usize>,
    duplicates: &'a RefCell<Vec<String>>,
    path: &'a TreePath<'a>,
    /// Whether the parser fails at the first duplicate key. That key is then the only recorded key.
    only_first: bool,
}

/// The boolean that a scalar stands for in YAML 1.1, such as `yes`. Upstream reads YAML 1.1; the parser knows only the
/// booleans of YAML 1.2. A scalar in quotes or with a tag is a text. Source: `resolve` of `go.yaml.in/yaml/v2`.
fn old_boolean(text: &str, scalar: &str) -> Option<bool> {
    /// Maximum bytes between the start of a tag and its scalar.
    const MAX_TAG: usize = 64;
    let flag = match scalar {
        "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => true,
        "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => false,
        _ => return None,
    };
    // `scalar` is a slice of `text`: the difference of the addresses is its offset.
    let at = scalar.as_ptr().addr().checked_sub(text.as_ptr().addr())?;
    let before = text.as_bytes().get(at.saturating_sub(MAX_TAG)..at)?;
    let mut words = before.split(|byte| byte.is_ascii_whitespace() || matches!(byte, b'[' | b'{' | b','));
    let last = words.rfind(|word| !word.is_empty() && !word.starts_with(b"&"));
    let is_tagged = last.is_some_and(|word| word.starts_with(b"!"));
    // There may be a line break between an opening quote and its scalar. So the byte after the scalar is checked: the
    // byte after a plain scalar is never a quote.
    let is_quoted = matches!(text.as_bytes().get(at + scalar.len()), Some(b'"' | b'\''));
    (!is_tagged && !is_quoted).then_some(flag)
}

/// Reads a key of a map.
struct Key<'a> {
    tree: Tree<'a>,
    map: &'a Map<String, Value>,
}

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E: Error>(self, name: &'de str) -> std::result::Result<String, E> {
        match old_boolean(self.tree.text, name) {
            Some(true) => self.visit_str("true"),
            Some(false) => self.visit_str("false"),
            None => self.visit_str(name),
        }
    }

    fn visit_str<E: Error>(self, name: &str) -> std::result::Result<String, E> {
        self.tree.charge(name.len())?;
        if self.tree.only_first && self.map.contains_key(name) {
            self.tree.duplicates.borrow_mut().push(name.to_owned());
            return Err(E::custom("duplicate key"));
        }
        Ok(name.to_owned())
    }
}

impl Tree<'_> {
    fn charge<E: Error>(self, bytes: usize) -> std::result::Result<(), E> {
        let left = self.left.get().checked_sub(bytes + 1);
        self.left.set(left.ok_or_else(|| E::custom("document contains excessive aliasing"))?);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value that JSON has")
    }

    fn visit_unit<E: Error>(self) -> std::result::Result<Value, E> {
        self.charge(0)?;
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> std::result::Result<Value, E> {
        self.charge(0)?;
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> std::result::Result<Value, E> {
        self.charge(0)?;
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> std::result::Result<Value, E> {
        self.charge(0)?;
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> std::result::Result<Value, E> {
        self.charge(0)?;
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_borrowed_str<E: Error>(self, value: &'de str) -> std::result::Result<Value, E> {
        match old_boolean(self.text, value) {
            Some(flag) => self.visit_bool(flag),
            None => self.visit_str(value),
        }
    }

    fn visit_str<E: Error>(self, value: &str) -> std::result::Result<Value, E> {
        self.charge(value.len())?;
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<Value, A::Error> {
        self.charge(0)?;
        let mut list = Vec::new();
        loop {
            let path = TreePath::Item(self.path, list.len());
            let Some(item) = items.next_element_seed(Tree { path: &path, ..self })? else { break };
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> std::result::Result<Value, A::Error> {
        self.charge(0)?;
        let mut map = Map::new();
        while let Some(name) = entries.next_key_seed(Key { tree: self, map: &map })? {
            let path = TreePath::Field(self.path, &name);
            let value = entries.next_value_seed(Tree { path: &path, ..self })?;
            if map.contains_key(&name) && self.duplicates.borrow().len() < MAX_DUPLICATES {
                self.duplicates.borrow_mut().push(format!("duplicate field \"{path}\""));
            }
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn error(text: &str) -> String {
        parse(text.as_bytes()).err().map_or_else(String::new, |error| error.message)
    }

    #[test]
    fn nesting_is_bounded_before_it_is_parsed() {
        let nested = "[".repeat(120_000);
        assert!(error(&nested).contains("too many flow collections"), "{}", error(&nested));
        // Closing brackets in a text do not hide opening brackets.
        assert!(error(&"[\"]\", ".repeat(60_000)).contains("too many flow collections"));
        // A short document with few levels reaches the parser.
        assert!(error(&"[".repeat(1_000)).starts_with("error converting YAML to JSON"));
    }

    #[test]
    fn yaml_has_at_most_128_levels() {
        let flow = |levels| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        let block = |levels| format!("{}a", "- ".repeat(levels));
        for nested in [flow(128), block(128)] {
            assert_eq!(error(&nested), "", "{nested}");
        }
        for nested in [flow(129), block(129)] {
            assert!(error(&nested).contains("recursion limit exceeded"), "{nested}: {}", error(&nested));
        }
    }

    #[test]
    fn short_documents_with_many_flow_collections_are_not_parsed_on_an_async_worker() {
        assert!(is_slow("[".repeat(4_000).as_bytes()));
        assert!(is_slow("[".repeat(724).as_bytes()));
        assert!(!is_slow("[".repeat(723).as_bytes()));
        assert!(!is_slow("a: [1]\n".repeat(300).as_bytes()));
    }

    #[test]
    fn only_documents_that_are_parsed_as_json_may_have_many_brackets() {
        let list = vec!["[]"; 1_000].join(",");
        let of = |start: &str, end: &str| format!("{start}[{list}]{end}");
        let is_fast = |start: &str, end: &str| !is_slow(of(start, end).as_bytes());
        assert!(is_fast("{\"a\": ", "}") && is_fast(" \n{\"a\": ", "}"));
        assert!(is_fast("{\"a\": 1, \"b\": ", "}"));
        for (start, end) in [
            ("", ""),
            ("{a: ", "}"),
            ("{\"a\": ", ""),
            ("{\"a\": ", "} # JSON has no comments"),
            // Parsers that ignore values accept these two.
            ("{\"b\": 1e999, \"a\": ", "}"),
            ("{\"b\": \"\\ud800\", \"a\": ", "}"),
            // The line of a duplicate key comes from the parser of YAML.
            ("{\"a\": 1, \"a\": ", "}"),
        ] {
            assert!(!is_fast(start, end), "{start}");
        }
    }

    #[test]
    fn a_definition_of_a_megabyte_with_brackets_in_its_texts_is_accepted() {
        let property = |number: usize| {
            let link = if number.is_multiple_of(8) { "See the [documentation] of this field. " } else { "" };
            let text = "It has a text. ".repeat(20);
            format!("p{number}:\n  description: |-\n    {link}{text}\n  type: string\n")
        };
        let text: String = (0..3_000).map(property).collect();
        assert!(text.len() > 1_000_000, "{}", text.len());
        assert!(steps(text.as_bytes()) < MAX_STEPS / 2, "{}", steps(text.as_bytes()));
        assert_eq!(parse(text.as_bytes()).unwrap().value.as_object().unwrap().len(), 3_000);
    }

    #[test]
    fn each_kind_of_token_counts_as_steps() {
        let open = "[".repeat(1_000);
        for token in
            ["[", "]", "{", "}", ",", ": ", "? ", "*a ", "&a ", "!a ", "'' ", "\"\" ", "- ", "\r", "\u{85}"]
        {
            let with = steps(format!("{open}{}", token.repeat(1_000)).as_bytes());
            assert!(with >= steps(open.as_bytes()) + 1_000_000, "{token:?}: {with}");
        }
    }

    #[test]
    fn letters_outside_of_ascii_are_no_steps() {
        let open = "[".repeat(1_000);
        assert_eq!(steps(format!("{open}{}", "дом".repeat(1_000)).as_bytes()), steps(open.as_bytes()));
    }

    #[test]
    fn aliases_expand_within_bounds() {
        let long = format!("a: &a {}\nb: [{}]", "x".repeat(100_000), "*a,".repeat(1_000));
        assert!(error(&long).contains("excessive aliasing"));
        let many = format!("a: &a [{}]\nb: [{}]", "1,".repeat(1_000), "*a,".repeat(1_000));
        assert!(error(&many).contains("excessive aliasing"));
        let parsed = parse(b"a: &a {x: 1}\nb: *a\n1: on").unwrap();
        assert_eq!(parsed.value, json!({"a": {"x": 1}, "b": {"x": 1}, "1": true}));
    }

    #[test]
    fn booleans_have_the_forms_of_yaml_1_1() {
        let read = |text: &str| parse(text.as_bytes()).unwrap().value;
        let text = "a: [y, Yes, ON, n, No, off, true, False, Y]\nb: &anchor on\nc: *anchor\n";
        let flags = json!([true, true, true, false, false, false, true, false, true]);
        assert_eq!(read(text), json!({"a": flags, "b": true, "c": true}));
        let texts = "a: ['y', \"on\", yeS, yes it is, !!str no,!!str  on]\nb: |-\n  on\nc: !!str &x yes\n";
        let expect = json!(["y", "on", "yeS", "yes it is", "no", "on"]);
        assert_eq!(read(texts), json!({"a": expect, "b": "on", "c": "yes"}));
        assert_eq!(read("a: \"\\\n  on\"\n"), json!({"a": "on"}), "a line break within the quotes");
        // The keys of JSON are texts.
        assert_eq!(
            read("on: 1\n'y': 2\nno: {n: off}\n"),
            json!({"true": 1, "y": 2, "false": {"false": false}})
        );
        assert_eq!(read("{\"a\": \"yes\", b: yes}"), json!({"a": "yes", "b": true}));
    }

    #[test]
    fn duplicate_keys_are_noted_with_their_place() {
        let parsed = parse(b"spec:\n  z: 1\n  a: [{b: 1, b: 2}]\n  z: 2\nkind: A\nkind: B\n").unwrap();
        let expected =
            ["duplicate field \"spec.a[0].b\"", "duplicate field \"spec.z\"", "duplicate field \"kind\""];
        assert_eq!(parsed.duplicates, expected);
        assert_eq!(parsed.value, json!({"spec": {"z": 2, "a": [{"b": 2}]}, "kind": "B"}));
        let many = "a: 1\n".repeat(1000);
        assert_eq!(parse(many.as_bytes()).unwrap().duplicates.len(), MAX_DUPLICATES);
    }

    #[test]
    fn the_first_duplicate_key_has_a_line() {
        let line = |text: &str| first_duplicate(text.as_bytes());
        assert_eq!(line("a: 1\nb:\n  c: 1\n  a: 2\n"), None);
        let text = "\na: 1\nb:\n- c: 1\n  d: |\n    x\n    y\n  c: 2\na: 1\n";
        assert_eq!(line(text).unwrap(), "line 8: key \"c\" already set in map");
        assert_eq!(line("{\"a\": 1,\n\"a\": 2}").unwrap(), "line 2: key \"a\" already set in map");
    }

    #[test]
    fn json_is_parsed_as_json() {
        let script = "{[(".repeat(100_000);
        let text = json!({"data": {"script": script}}).to_string();
        assert_eq!(parse(text.as_bytes()).unwrap().value["data"]["script"], script);
    }
}
