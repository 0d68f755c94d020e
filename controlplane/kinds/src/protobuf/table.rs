//! The generated table of messages: field numbers, JSON names and types.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use crate::schema::model::messages_text;

static TABLES: LazyLock<Tables> = LazyLock::new(Tables::load);

/// Index of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct MessageId(u16);

/// All messages.
#[derive(Default)]
pub(super) struct Tables {
    messages: Vec<Message>,
    names: HashMap<Box<str>, MessageId>,
}

/// One message's fields, sorted by number.
pub(super) struct Message {
    fields: Box<[Field]>,
}

/// One field.
pub(super) struct Field {
    pub(super) number: u32,
    /// JSON name; empty if the message's fields are inlined.
    pub(super) name: Box<str>,
    pub(super) r#type: Type,
    pub(super) repeated: bool,
    pub(super) map: bool,
}

/// A field's type.
#[derive(Clone, Copy, Debug)]
pub(super) enum Type {
    Text,
    Int,
    Bool,
    Bytes,
    Double,
    Time,
    MicroTime,
    Quantity,
    IntOrString,
    /// A message of several fields; its JSON form is the value of the last field that is set.
    Choice(MessageId),
    /// An embedded JSON document.
    Json,
    Message(MessageId),
}

/// The table, decompressed at its first use.
pub(super) fn tables() -> &'static Tables {
    &TABLES
}

// === impl Tables ===

impl Tables {
    fn load() -> Tables {
        let text = messages_text();
        let Ok(raw) = serde_json::from_str::<BTreeMap<Cow<'_, str>, Vec<Row<'_>>>>(&text) else {
            return Tables::default();
        };
        let names: HashMap<Box<str>, MessageId> =
            raw.keys().zip(0..).map(|(name, id)| (Box::from(name.as_ref()), MessageId(id))).collect();
        let messages = raw.values().map(|rows| Message::new(rows, &names)).collect();
        Tables { messages, names }
    }

    /// The message of a definition.
    pub(super) fn find(&self, name: &str) -> Option<&Message> {
        self.names.get(name).map(|id| self.get(*id))
    }

    /// The message with this index.
    pub(super) fn get(&self, id: MessageId) -> &Message {
        &self.messages[usize::from(id.0)]
    }
}

// === impl Message ===

impl Message {
    fn new(rows: &[Row<'_>], names: &HashMap<Box<str>, MessageId>) -> Message {
        let mut fields: Vec<Field> = rows.iter().filter_map(|row| Field::new(row, names)).collect();
        fields.sort_unstable_by_key(|field| field.number);
        Message { fields: fields.into() }
    }

    /// All fields, sorted by number.
    pub(super) fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// The field with this number.
    pub(super) fn field(&self, number: u32) -> Option<&Field> {
        let at = self.fields.binary_search_by_key(&number, |field| field.number).ok()?;
        self.fields.get(at)
    }

    /// Whether the message only wraps a list.
    pub(super) fn is_wrapper(&self) -> bool {
        matches!(&*self.fields, [field] if field.name.is_empty() && field.repeated)
    }
}

// === impl Field ===

/// `[number, JSON name, type]`.
type Row<'a> = (u32, Cow<'a, str>, Cow<'a, str>);

impl Field {
    fn new(row: &Row<'_>, names: &HashMap<Box<str>, MessageId>) -> Option<Field> {
        let (number, name, notation) = row;
        let kind = notation.trim_start_matches(['*', '%']);
        let r#type = match kind {
            "s" => Type::Text,
            "i" => Type::Int,
            "b" => Type::Bool,
            "y" => Type::Bytes,
            "d" => Type::Double,
            _ => Type::named(kind.strip_prefix('m')?, names)?,
        };
        Some(Field {
            number: *number,
            name: Box::from(name.as_ref()),
            r#type,
            repeated: notation.starts_with('*'),
            map: notation.starts_with('%'),
        })
    }
}

impl Type {
    fn named(name: &str, names: &HashMap<Box<str>, MessageId>) -> Option<Type> {
        let (package, short) = name.rsplit_once('.')?;
        Some(match (package.ends_with("meta.v1"), short) {
            (true, "Time") => Type::Time,
            (true, "MicroTime") => Type::MicroTime,
            (true, "FieldsV1") | (false, "RawExtension" | "JSON") => Type::Json,
            (false, "JSONSchemaPropsOrArray" | "JSONSchemaPropsOrBool" | "JSONSchemaPropsOrStringArray") => {
                Type::Choice(*names.get(name)?)
            }
            (false, "Quantity") => Type::Quantity,
            (false, "IntOrString") => Type::IntOrString,
            _ => Type::Message(*names.get(name)?),
        })
    }
}
