//! Approved certificate signing requests for our signers are signed.

pub(crate) mod run;
mod sign;

pub use sign::{SignError, Signer};
