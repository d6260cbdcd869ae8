//! Tests of `SharedBuffer`, the only place where ranks that run as threads write to shared memory.
//!
//! This file includes the module itself and needs only the standard library, so that miri can run it and find every
//! uninitialised read, race and leak.
#![allow(unsafe_code)]

#[path = "../src/host/shared.rs"]
mod shared;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use shared::SharedBuffer;

/// Splits `len` elements into `parts` ranges. Some are empty if there are more ranges than elements.
fn split(len: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|i| len * i / parts..len * (i + 1) / parts).collect()
}

fn fill<T: Copy>(buffer: &SharedBuffer<T>, range: Range<usize>, value: impl Fn(usize) -> T) {
    // SAFETY: in every test, ranges in use at the same time come from one `split` or from one thread, and `take` is called
    // only after they are written.
    let out = unsafe { buffer.range(range.clone()) };
    for (x, i) in out.iter_mut().zip(range) {
        x.write(value(i));
    }
}

fn take<T: Copy>(buffer: &SharedBuffer<T>) -> Option<Vec<T>> {
    // SAFETY: tests call this after all elements are written, by threads that have ended or whose writes were waited for.
    unsafe { buffer.take() }
}

fn check_written_by_threads<T: Copy + Send + PartialEq + std::fmt::Debug>(value: impl Fn(usize) -> T + Sync) {
    for (len, threads) in [(1, 1), (2, 2), (7, 3), (64, 4), (3, 5), (0, 2)] {
        let buffer = SharedBuffer::new(len).expect("enough memory");
        std::thread::scope(|scope| {
            for range in split(len, threads) {
                let (buffer, value) = (&buffer, &value);
                scope.spawn(move || fill(buffer, range, value));
            }
        });
        let data = take(&buffer).expect("the first call returns the vector");
        assert_eq!(data, (0..len).map(&value).collect::<Vec<_>>());
        assert_eq!(take(&buffer), None, "returned twice");
        drop(buffer);
        assert_eq!(data.len(), len, "the vector outlives the buffer");
    }
}

#[test]
fn several_threads_write_one_vector() {
    check_written_by_threads(|i| i as u8);
    check_written_by_threads(|i| i as f64 / 3.0);
    check_written_by_threads(|i| (i as u8, i as u64));
    check_written_by_threads(|_| ());
}

#[test]
fn the_thread_that_finishes_the_last_range_takes_the_vector() {
    // As ranks do in a collective: they take ranges until there are no more, and the one that finishes the last range takes
    // the vector.
    for round in 0..if cfg!(miri) { 8 } else { 200 } {
        let (len, ranges) = (100, split(100, 9));
        let buffer = SharedBuffer::new(len).expect("enough memory");
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            let mut data = None;
            while let Some(range) = ranges.get(next.fetch_add(1, Ordering::SeqCst)) {
                fill(&buffer, range.clone(), |i| i + round);
                if done.fetch_add(1, Ordering::SeqCst) + 1 == ranges.len() {
                    data = take(&buffer);
                    // This thread sees the writes of all threads without joining them.
                    assert_eq!(data, Some((round..round + len).collect()));
                }
            }
            data
        };
        let got: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(work));
            threads
                .into_iter()
                .filter_map(|thread| thread.join().expect("the thread did not panic"))
                .collect()
        });
        assert_eq!(got.len(), 1, "exactly one thread takes the vector");
    }
}

#[test]
fn only_one_of_many_callers_takes_the_vector() {
    let buffer = SharedBuffer::new(10).expect("enough memory");
    fill(&buffer, 0..10, |i| i as u32);
    let got: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(|| take(&buffer)));
        threads.into_iter().filter_map(|thread| thread.join().expect("the thread did not panic")).collect()
    });
    assert_eq!(got, [(0..10).collect::<Vec<u32>>()]);
}

#[test]
fn dropping_a_buffer_frees_its_memory() {
    for len in [0, 1, 1000] {
        // Not written, partly written and fully written; dropped on this thread and on another.
        for written in [0, len / 2, len] {
            let buffer = SharedBuffer::new(len).expect("enough memory");
            fill(&buffer, 0..written, |i| i as u64);
            drop(buffer);
            let buffer = SharedBuffer::new(len).expect("enough memory");
            fill(&buffer, len - written..len, |i| i as u64);
            std::thread::spawn(move || drop(buffer)).join().expect("the thread did not panic");
        }
    }
}

#[test]
fn ranges_can_be_rewritten_but_not_exceed_the_buffer() {
    let buffer = SharedBuffer::new(5).expect("enough memory");
    fill(&buffer, 0..5, |_| 1u8);
    fill(&buffer, 2..4, |_| 2);
    fill(&buffer, 5..5, |_| 3);
    for (start, end) in [(0, 6), (6, 6), (4, 2), (usize::MAX, 0)] {
        let outside =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fill(&buffer, start..end, |_| 4)));
        assert!(outside.is_err(), "{start}..{end} of 5 was returned");
    }
    assert_eq!(take(&buffer), Some(vec![1, 1, 2, 2, 1]));
}

#[test]
fn impossible_sizes_return_none() {
    assert!(SharedBuffer::<u64>::new(usize::MAX / 4).is_none());
    assert!(SharedBuffer::<u8>::new(usize::MAX).is_none());
    assert_eq!(format!("{:?}", SharedBuffer::<u64>::new(3)), "Some(SharedBuffer(3 elements))");
}
