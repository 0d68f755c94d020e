//! Controller of the definitions of custom resources.
//!
//! | part | module |
//! |---|---|
//! | names, conditions, resources of the registry | `controller` |
//! | deletes the objects of a deleted definition | `cleanup` |
//! | changes of definitions by this server | `stored` |
//! | attempts after an error of the store | `retry` |
//!
//! A definition is served before its condition `Established` is written. A client that waits for the condition can use
//! the resource immediately. While a definition cannot be served, the condition is false and has the reason.

mod cleanup;
mod controller;
mod retry;
mod stored;

pub(crate) use controller::start;
