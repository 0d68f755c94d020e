//! D-Bus messages: calls to systemd and its replies (D-Bus specification, "Message Protocol"). Pure.

/// Length of the fixed part of a header, up to the length of the header fields.
pub(crate) const FIXED: usize = 16;
/// Maximum length of a message. Messages of systemd are much smaller.
const MAX_LENGTH: usize = 16 << 20;

const OBJECT: &str = "/org/freedesktop/systemd1";
const SERVICE: &str = "org.freedesktop.systemd1";

/// The value of a property. Each variant states its D-Bus signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// `s`
    Text(String),
    /// `b`
    Flag(bool),
    /// `t`
    Number(u64),
    /// `au`
    Numbers(Vec<u32>),
    /// `ay`
    Bytes(Vec<u8>),
    /// `a(ss)`
    Pairs(Vec<(String, String)>),
}

/// The body of a call, written sequentially.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

/// A received message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Incoming {
    /// The reply to the call with this serial number, and its first value if that is a string or path.
    Reply { to: u32, text: String },
    /// An error reply.
    Refusal { to: u32, name: String, text: String },
    /// A job has ended.
    JobRemoved { job: String, result: String },
    /// Any other message.
    Other,
}

/// A reader of a message. Its methods return `None` if the message ends early.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// The header fields that the parser uses.
#[derive(Default)]
struct Fields {
    reply_to: u32,
    member: String,
    error: String,
    signature: String,
}

// === impl Value ===

impl Value {
    fn signature(&self) -> &'static str {
        match self {
            Self::Text(_) => "s",
            Self::Flag(_) => "b",
            Self::Number(_) => "t",
            Self::Numbers(_) => "au",
            Self::Bytes(_) => "ay",
            Self::Pairs(_) => "a(ss)",
        }
    }
}

// === impl Writer ===

impl Writer {
    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.number(length(text.len()));
        self.0.extend(text.as_bytes());
        self.0.push(0);
        self
    }

    pub(crate) fn flag(&mut self, flag: bool) -> &mut Self {
        self.number(flag.into())
    }

    /// Writes properties; their D-Bus signature is `a(sv)`.
    pub(crate) fn properties<'a>(
        &mut self,
        properties: impl IntoIterator<Item = (&'a str, &'a Value)>,
    ) -> &mut Self {
        self.array(8, |out| {
            for (name, value) in properties {
                out.align(8);
                out.text(name).variant(value);
            }
        })
    }

    /// An empty array of structs.
    pub(crate) fn empty_array(&mut self) -> &mut Self {
        self.array(8, |_| {})
    }

    fn number(&mut self, number: u32) -> &mut Self {
        self.align(4);
        self.0.extend(number.to_le_bytes());
        self
    }

    fn signature(&mut self, signature: &str) -> &mut Self {
        self.0.push(u8::try_from(signature.len()).unwrap_or(u8::MAX));
        self.0.extend(signature.as_bytes());
        self.0.push(0);
        self
    }

    fn variant(&mut self, value: &Value) {
        self.signature(value.signature());
        match value {
            Value::Text(text) => {
                self.text(text);
            }
            Value::Flag(flag) => {
                self.flag(*flag);
            }
            Value::Number(number) => {
                self.align(8);
                self.0.extend(number.to_le_bytes());
            }
            Value::Numbers(numbers) => {
                self.array(4, |out| {
                    for number in numbers {
                        out.number(*number);
                    }
                });
            }
            Value::Bytes(bytes) => {
                self.array(1, |out| out.0.extend(bytes));
            }
            Value::Pairs(pairs) => {
                self.array(8, |out| {
                    for (one, other) in pairs {
                        out.align(8);
                        out.text(one).text(other);
                    }
                });
            }
        }
    }

    /// Writes an array. Its length counts the elements, without the padding before the first one.
    fn array(&mut self, alignment: usize, fill: impl FnOnce(&mut Self)) -> &mut Self {
        self.number(0);
        let at = self.0.len();
        self.align(alignment);
        let begin = self.0.len();
        fill(self);
        let whole = length(self.0.len() - begin).to_le_bytes();
        self.0.splice(at - whole.len()..at, whole);
        self
    }

    fn field(&mut self, code: u8, kind: &str, value: &str) {
        self.align(8);
        self.0.push(code);
        self.signature(kind);
        if kind == "g" {
            self.signature(value)
        } else {
            self.text(value)
        };
    }

    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }
}

/// Encodes a call of systemd's manager. `signature` is the signature of the body.
pub(crate) fn call(serial: u32, member: &str, signature: &str, body: &Writer) -> Vec<u8> {
    // Little endian, a method call, no flags, version 1.
    let mut out = Writer(vec![b'l', 1, 0, 1]);
    out.number(length(body.0.len())).number(serial);
    out.array(8, |out| {
        out.field(1, "o", OBJECT);
        out.field(2, "s", &format!("{SERVICE}.Manager"));
        out.field(3, "s", member);
        out.field(6, "s", SERVICE);
        out.field(8, "g", signature);
    });
    out.align(8);
    out.0.extend(&body.0);
    out.0
}

/// The number of bytes after the fixed part. `None` if the message is invalid.
pub(crate) fn rest(fixed: &[u8; FIXED]) -> Option<usize> {
    let mut header = Reader { bytes: fixed, at: 4 };
    let (body, _serial, fields) = (header.number()?, header.number()?, header.number()?);
    let size = |size: u32| usize::try_from(size).ok().filter(|size| *size <= MAX_LENGTH);
    (fixed[0] == b'l').then_some(())?;
    Some(size(fields)?.next_multiple_of(8) + size(body)?)
}

/// Parses a complete message. `None` if it is invalid.
pub(crate) fn parse(bytes: &[u8]) -> Option<Incoming> {
    let kind = *bytes.get(1)?;
    let mut reader = Reader { bytes, at: 12 };
    let end = usize::try_from(reader.number()?).ok()? + FIXED;
    let mut fields = Fields::default();
    while reader.at < end {
        reader.field(&mut fields)?;
    }
    reader.align(8);
    let mut text = || match fields.signature.as_bytes() {
        [b's' | b'o', ..] => reader.text(),
        _ => Some(String::new()),
    };
    Some(match (kind, fields.member.as_str()) {
        (2, _) => Incoming::Reply { to: fields.reply_to, text: text()? },
        (3, _) => Incoming::Refusal { to: fields.reply_to, text: text()?, name: fields.error },
        (4, "JobRemoved") if fields.signature == "uoss" => {
            let _id = reader.number()?;
            let (job, _unit, result) = (reader.text()?, reader.text()?, reader.text()?);
            Incoming::JobRemoved { job, result }
        }
        _ => Incoming::Other,
    })
}

// === impl Reader ===

impl Reader<'_> {
    fn number(&mut self) -> Option<u32> {
        self.align(4);
        let bytes = self.bytes.get(self.at..)?.first_chunk()?;
        self.at += bytes.len();
        Some(u32::from_le_bytes(*bytes))
    }

    fn text(&mut self) -> Option<String> {
        let length = usize::try_from(self.number()?).ok()?;
        self.characters(length)
    }

    fn signature(&mut self) -> Option<String> {
        let length = usize::from(*self.bytes.get(self.at)?);
        self.at += 1;
        self.characters(length)
    }

    /// Reads characters and the terminating NUL.
    fn characters(&mut self, length: usize) -> Option<String> {
        let text = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length + 1;
        String::from_utf8(text.to_vec()).ok()
    }

    fn field(&mut self, into: &mut Fields) -> Option<()> {
        self.align(8);
        let code = *self.bytes.get(self.at)?;
        self.at += 1;
        let kind = self.signature()?;
        match (kind.as_str(), code) {
            ("u", 5) => into.reply_to = self.number()?,
            ("u", _) => drop(self.number()?),
            ("g", 8) => into.signature = self.signature()?,
            ("g", _) => drop(self.signature()?),
            ("s", 3) => into.member = self.text()?,
            ("s", 4) => into.error = self.text()?,
            ("s" | "o", _) => drop(self.text()?),
            _ => return None,
        }
        Some(())
    }

    fn align(&mut self, to: usize) {
        self.at = self.at.next_multiple_of(to);
    }
}

fn length(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message as systemd sends it: header fields in systemd's order, and a body.
    fn incoming(kind: u8, fields: &[(u8, &str, &str)], reply_to: Option<u32>, body: &Writer) -> Vec<u8> {
        let mut out = Writer(vec![b'l', kind, 1, 1]);
        out.number(length(body.0.len())).number(7);
        out.array(8, |out| {
            if let Some(serial) = reply_to {
                out.align(8);
                out.0.push(5);
                out.signature("u").number(serial);
            }
            fields.iter().for_each(|(code, kind, value)| out.field(*code, kind, value));
        });
        out.align(8);
        out.0.extend(&body.0);
        out.0
    }

    fn parsed(bytes: &[u8]) -> Incoming {
        let fixed = bytes.first_chunk().unwrap();
        assert_eq!(rest(fixed), Some(bytes.len() - FIXED));
        parse(bytes).unwrap()
    }

    #[test]
    fn a_call_has_the_alignment_and_lengths_of_the_specification() {
        let mut body = Writer::default();
        let (slice, pids) = (Value::Text("a.slice".into()), Value::Numbers(vec![1, 2]));
        body.text("x.scope").text("replace").properties([("Slice", &slice), ("PIDs", &pids)]).empty_array();
        let expected = [
            b"\x07\0\0\0x.scope\0\x07\0\0\0replace\0".as_slice(),
            // 60 bytes of properties, the first aligned to 8.
            b"\x3c\0\0\0\0\0\0\0",
            b"\x05\0\0\0Slice\0\x01s\0\0\0\0\x07\0\0\0a.slice\0\0\0\0\0",
            b"\x04\0\0\0PIDs\0\x02au\0\0\0\0\x08\0\0\0\x01\0\0\0\x02\0\0\0",
            b"\0\0\0\0",
        ]
        .concat();
        let whole = call(3, "StartTransientUnit", "ssa(sv)a(sa(sv))", &body);
        assert_eq!(whole[..4], [b'l', 1, 0, 1]);
        assert_eq!(rest(whole.first_chunk().unwrap()), Some(whole.len() - FIXED));
        assert_eq!(body.0, expected);
    }

    #[test]
    fn pairs_are_aligned_structs() {
        let mut body = Writer::default();
        let pairs = Value::Pairs(vec![("a-b".into(), "m".into()), ("c".into(), "rw".into())]);
        body.properties([("DeviceAllow", &pairs)]);
        let expected = [
            b"\x3f\0\0\0\0\0\0\0".as_slice(),
            b"\x0b\0\0\0DeviceAllow\0\x05a(ss)\0\0\x1f\0\0\0\0\0\0\0",
            b"\x03\0\0\0a-b\0\x01\0\0\0m\0\0\0",
            b"\x01\0\0\0c\0\0\0\x02\0\0\0rw\0",
        ]
        .concat();
        assert_eq!(body.0, expected);
    }

    #[test]
    fn replies_errors_and_ends_of_jobs_are_distinguished() {
        let mut path = Writer::default();
        path.text("/job/12");
        let reply = incoming(2, &[(8, "g", "o"), (7, "s", "org.freedesktop.systemd1")], Some(3), &path);
        assert_eq!(parsed(&reply), Incoming::Reply { to: 3, text: "/job/12".into() });
        let empty = incoming(2, &[], Some(4), &Writer::default());
        assert_eq!(parsed(&empty), Incoming::Reply { to: 4, text: String::new() });
        let mut why = Writer::default();
        why.text("not loaded");
        let refusal = incoming(3, &[(4, "s", "x.NoSuchUnit"), (8, "g", "s")], Some(5), &why);
        let expected = Incoming::Refusal { to: 5, name: "x.NoSuchUnit".into(), text: "not loaded".into() };
        assert_eq!(parsed(&refusal), expected);
        let mut removed = Writer::default();
        removed.number(12).text("/job/12").text("x.scope").text("done");
        let signal = incoming(4, &[(1, "o", "/"), (3, "s", "JobRemoved"), (8, "g", "uoss")], None, &removed);
        assert_eq!(parsed(&signal), Incoming::JobRemoved { job: "/job/12".into(), result: "done".into() });
        let other = incoming(4, &[(3, "s", "UnitNew"), (8, "g", "so")], None, &path);
        assert_eq!(parsed(&other), Incoming::Other);
    }

    #[test]
    fn damaged_messages_are_refused() {
        let mut path = Writer::default();
        path.text("/job/12");
        let whole = incoming(2, &[(8, "g", "o")], Some(3), &path);
        for end in 0..whole.len() - 1 {
            assert_eq!(parse(&whole[..end]), None, "{end}");
        }
        assert_eq!(rest(&[b'B'; FIXED]), None);
        let mut enormous = [0; FIXED];
        enormous[0] = b'l';
        enormous[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(rest(&enormous), None);
    }
}
