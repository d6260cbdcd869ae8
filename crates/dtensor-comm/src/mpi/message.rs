//! [`Message`]: a small JSON message that is being sent or received.

use std::mem::ManuallyDrop;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::raw::{Comm, Request, Span};
use crate::{Error, Result};

/// A JSON message that is being sent or received. If it is dropped before it is done, its memory leaks, because the library may
/// still use it.
#[derive(Debug)]
pub(super) struct Message {
    request: Request,
    bytes: ManuallyDrop<Vec<u8>>,
}

impl Message {
    /// Begins to send an encoded message.
    pub(super) fn send(comm: Comm, bytes: Vec<u8>, to: usize, tag: i32) -> Result<Self> {
        let mut bytes = ManuallyDrop::new(bytes);
        // SAFETY: the bytes live until the request is done, or for ever.
        let request = unsafe { comm.send(&Span::of_bytes(&mut bytes), to, tag)? };
        Ok(Message { request, bytes })
    }

    /// Begins to receive a message of at most `max_len` bytes, from one member or from any.
    pub(super) fn receive(comm: Comm, max_len: usize, from: Option<usize>, tag: i32) -> Result<Self> {
        let mut bytes = ManuallyDrop::new(vec![0; max_len]);
        // SAFETY: the bytes live until the request is done, or for ever, and are not read before it is done.
        let request = unsafe { comm.receive_up_to(&Span::of_bytes(&mut bytes), from, tag)? };
        Ok(Message { request, bytes })
    }

    /// Returns true if the message has been sent or has arrived.
    pub(super) fn test(&mut self) -> Result<bool> {
        self.request.test()
    }

    pub(super) fn is_done(&self) -> bool {
        self.request.is_done()
    }

    /// Decodes a message that has arrived.
    pub(super) fn decode<T: DeserializeOwned>(&self) -> Result<T> {
        if !self.is_done() {
            return Err(Error::argument("mpi", "a message was decoded before it arrived"));
        }
        decode(&self.bytes)
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if self.is_done() {
            // SAFETY: the bytes are not used after this, and the library is done with them.
            unsafe { ManuallyDrop::drop(&mut self.bytes) };
        }
    }
}

/// Encodes a message as JSON. Returns an error if it is longer than `max_len` bytes.
pub(super) fn encode<T: Serialize>(content: &T, max_len: usize) -> Result<Vec<u8>> {
    let bytes = serde_json::to_vec(content).map_err(|error| Error::argument("mpi", error.to_string()))?;
    if bytes.len() > max_len {
        let message =
            format!("a control message takes {} bytes, but at most {max_len} are possible", bytes.len());
        return Err(Error::argument("mpi", message));
    }
    Ok(bytes)
}

/// Decodes a message, which zeros may follow.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    serde_json::from_slice(&bytes[..end])
        .map_err(|error| Error::argument("mpi", format!("cannot decode a control message: {error}")))
}
