//! Conversion of objects between the versions of a resource.

use std::future::Future;
use std::pin::Pin;

use serde_json::Value;

use super::Resource;

/// A running conversion.
pub type Converting<'a> = Pin<Box<dyn Future<Output = Result<Vec<Value>, ConversionError>> + Send + 'a>>;

/// Converts objects to another version of their resource.
pub trait Convert: Send + Sync {
    /// Converts objects to the version `to`, in order. The `apiVersion` of each object names its current version.
    /// Objects that have the version `to` already are returned unchanged.
    fn convert<'a>(&'a self, objects: Vec<Value>, to: &'a Resource) -> Converting<'a>;

    /// Whether a conversion is ready at once: it does not wait for another server.
    fn is_immediate(&self) -> bool {
        false
    }
}

/// A conversion failed. `Display` is the message for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ConversionError {
    /// The wanted apiVersion.
    pub to: String,
    /// The cause.
    pub reason: String,
}
