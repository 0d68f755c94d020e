//! A protobuf message in a record: base64 of its wire format, which all versions can read.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use prost::Message;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<T: Message, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(value.encode_to_vec()))
}

pub(crate) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Message + Default,
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    let bytes = STANDARD.decode(text).map_err(Error::custom)?;
    T::decode(bytes.as_slice()).map_err(Error::custom)
}
