//! Paths of fields in a schema (`cel.ValidFieldPath`): `.spec.a`, `.spec['a.b']`.

use crate::schema::Schema;
use crate::violation::Path;

/// Finds the field that the path names. Returns its path as messages print it, and its schema.
pub(crate) fn resolve<'a>(
    text: &str,
    schema: &'a Schema,
    brackets: bool,
) -> Result<(Path, &'a Schema), String> {
    let mut path = Path::default();
    let mut schema = schema;
    let mut rest = text;
    while !rest.is_empty() {
        let name;
        if let Some(after) = rest.strip_prefix('.') {
            let end = after.find(['.', '[', ']']).unwrap_or(after.len());
            if end == 0 {
                return Err("unexpected end of JSON path".to_owned());
            }
            name = after[..end].to_owned();
            rest = &after[end..];
        } else if let Some(after) = rest.strip_prefix('[') {
            if !brackets {
                return Err("array notation is not allowed".to_owned());
            }
            let (inside, after) = quoted(after)?;
            name = inside;
            rest = after;
        } else {
            let end = rest.find(['.', '[', ']']).filter(|end| *end > 0).unwrap_or(rest.len());
            return Err(format!("expected [ or . but got: {}", &rest[..end]));
        }
        if !schema.properties.is_empty() {
            path = path.field(&name);
            schema = schema.properties.get(name.as_str()).ok_or("does not refer to a valid field")?;
        } else if let Some(additional) = schema.additional_schema() {
            path = path.key(&name);
            schema = additional;
        } else {
            return Err("does not refer to a valid field".to_owned());
        }
    }
    Ok((path, schema))
}

fn quoted(text: &str) -> Result<(String, &str), String> {
    let Some(inside) = text.strip_prefix('\'') else {
        return Err(format!("expected single quoted string but got {text}"));
    };
    let mut name = String::new();
    let mut chars = inside.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\'' => {
                let rest = &inside[at + 1..];
                let after = rest.strip_prefix(']').ok_or_else(|| format!("expected ] but got {rest}"))?;
                return Ok((name, after));
            }
            '\\' => match chars.next() {
                Some((_, escaped @ ('\'' | '\\'))) => name.push(escaped),
                Some((_, 'n')) => name.push('\n'),
                Some((_, 't')) => name.push('\t'),
                _ => return Err("invalid string literal: invalid escape char".to_owned()),
            },
            c => name.push(c),
        }
    }
    Err("unexpected end of JSON path".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn paths_follow_the_schema() {
        let schema = Schema::parse(&json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {
            "a.b": {"type": "string"}, "m": {"type": "object", "additionalProperties": {"type": "integer"}}}}}}))
        .unwrap();
        assert_eq!(resolve(".spec['a.b']", &schema, true).unwrap().0.to_string(), "spec.a.b");
        assert_eq!(resolve(".spec.m.key", &schema, true).unwrap().0.to_string(), "spec.m[key]");
        for bad in ["spec", ".spec.x", ".spec[0]", ".spec['a.b'", "."] {
            assert!(resolve(bad, &schema, true).is_err(), "{bad}");
        }
        for (bad, token) in [("a.b", "a"), ("a", "a"), ("]", "]")] {
            let error = resolve(bad, &schema, true).unwrap_err();
            assert_eq!(error, format!("expected [ or . but got: {token}"));
        }
    }
}
