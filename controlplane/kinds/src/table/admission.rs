//! Webhook configurations.

use jiff::Timestamp;
use serde_json::Value;

use super::{AGE, Column, NAME, created, integer, length, name};

pub(crate) const WEBHOOKS: &[Column] = &[NAME, integer("Webhooks", "Number of webhooks."), AGE];

pub(crate) fn webhooks(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), length(&object["webhooks"]), created(object, now)]
}
