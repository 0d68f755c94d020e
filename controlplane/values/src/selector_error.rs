//! Errors and size limits of label and field selectors.

/// Maximum bytes of a selector. Each watch evaluates its selector for each event.
pub(crate) const MAX_BYTES: usize = 64 << 10;
/// Maximum requirements of a selector.
pub(crate) const MAX_REQUIREMENTS: usize = 256;

/// Error of a selector: the API server answers 400.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SelectorError {
    /// The syntax of a requirement of a label selector is invalid.
    #[error("unable to parse requirement: {0}")]
    Label(String),
    /// The syntax of a label selector between its requirements is invalid.
    #[error("{0}")]
    Syntax(String),
    /// The syntax of a field selector is invalid. The fields are the selector and the requirement.
    #[error("invalid selector: '{0}'; can't understand '{1}'")]
    Field(String, String),
    /// The kind does not support the field in selectors. The text is upstream's message.
    #[error("{0}")]
    UnknownField(String),
    /// The selector is longer than [`MAX_BYTES`].
    #[error("the selector has too many bytes: {0}, the limit is {MAX_BYTES}")]
    TooManyBytes(usize),
    /// The selector has more than [`MAX_REQUIREMENTS`] requirements.
    #[error("the selector has too many requirements: {0}, the limit is {MAX_REQUIREMENTS}")]
    TooManyRequirements(usize),
    /// The operator in a LabelSelector object is unknown.
    #[error("{0:?} is not a valid label selector operator")]
    Operator(String),
}

/// Refuses a text above the size limit.
pub(crate) fn check_size(text: &str) -> Result<(), SelectorError> {
    if text.len() > MAX_BYTES {
        return Err(SelectorError::TooManyBytes(text.len()));
    }
    Ok(())
}

/// Refuses more requirements than the limit.
pub(crate) fn check_count(count: usize) -> Result<(), SelectorError> {
    if count > MAX_REQUIREMENTS {
        return Err(SelectorError::TooManyRequirements(count));
    }
    Ok(())
}
