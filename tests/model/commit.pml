/* SPDX-License-Identifier: Apache-2.0
 *
 * The commit protocol of csrc/engine, step by step, for spin: what can happen between any two system calls of several
 * saves at one path, whose processes may die at any of them, and on a disk that loses power.
 *
 * A label of the name of a failpoint of csrc/base/failpoint.h stands where the code has that failpoint.
 * test_commit_model.py runs this file; docs/internals/architecture.md says what it shows.
 *
 *   SAVERS  saves, begun in the order of their numbers (they are alike; whoever is first gets number 0)
 *   RANKS   of each save
 *   LOCKS   0: the file system has no flock
 *   TAKE_OVER  1: saves are told to take the right of a live one away
 *   POWER   1: power is lost once, when all who have begun are over or dead; another save then meets what is left
 *   EMPTY   1: there is no checkpoint at first
 *   OVERWRITE  0: saves do not replace a checkpoint
 *   READER  1: somebody loads meanwhile
 *   LATE    1: each save runs on a machine of its own, and the file system they share shows late what others have done.
 *           A file is on the server once it was flushed; a sync of a file that somebody else removed creates it anew;
 *           locks are not seen elsewhere; what is asked for by its name may be as it was at any time before. A listing
 *           shows what is on the server when it begins, and so does what is asked for after it
 *   M_...   a mutation: the code as it must not be
 *
 * Left out: commit marks of single ranks, forked children, file systems that retry a rename by themselves. With LATE=1
 * three saves at once are not sound: two that take each other's rights away may leave no trace of it to the third.
 */
#ifndef SAVERS
#define SAVERS 2
#endif
#ifndef RANKS
#define RANKS 3
#endif
#ifndef LOCKS
#define LOCKS 1
#endif
#ifndef TAKE_OVER
#define TAKE_OVER 0
#endif
#ifndef POWER
#define POWER 1
#endif
#ifndef EMPTY
#define EMPTY 0
#endif
#ifndef OVERWRITE
#define OVERWRITE 1
#endif
#ifndef READER
#define READER 0
#endif
#ifndef LATE
#define LATE 0
#endif

#define OLD SAVERS        /* the save that committed before all this */
#define NONE (SAVERS + 1) /* as a mark: there is no `.metadata` */
#define FILES ((SAVERS + 1) * RANKS)
#define BIT(s) (1 << (s))
#define HAS(set, s) (((set) >> (s)) & 1)

/* Properties by number, so that a failure says which. */
#define MUST(property, x) assert((x) || (property) == 0)
#define WHOLE 1     /* what .metadata names exists whole: as seen now, and as any power loss may show it */
#define ONE_RIGHT 2 /* who commits holds its right, and commits once; who was told it failed has not committed */
#define NO_BLOCK 3  /* whoever is alone at the path is never refused, and sweeps */
#define NEWEST 4    /* what was reported as committed stays, through power loss, until a later save replaces it */
#define LIVE 5      /* while locks work, nobody takes a right or files of a live save away */
#define READS 6     /* a reader gets all files of one checkpoint, or finds that there is a newer one */

/* --- The directory -------------------------------------------------------------------------------------------------
 *
 * One byte for the file of one rank. Ranks of a save are alike: after each change their bytes are put in order, so that
 * states which differ by the ranks' numbers alone are one.
 */
#define LISTED(s) BIT(s) /* in the listing of the sweep of s, and not known to be named; of SAVERS: reader has to open */
#define SEEN 8           /* the name is there */
#define ON_DISK 16       /* the name was there when the directory was last synced */
#define STAGE 224
#define ABSENT 0   /* the rank has not begun, or is dead and without a file */
#define MAY 32     /* begun, no file yet */
#define MADE 64    /* created, not whole */
#define GOOD 96    /* written, synced, handed in */
#define FAILED 128 /* handed in an error; the file may be there */

byte file[FILES];
byte tmps;                /* of which saves `.metadata.{save id}.tmp` is there */
byte holder[SAVERS];      /* 1 + who holds the lock of the tmp */
#if LATE
byte unflushed;           /* of which saves it is there on their own machine alone */
#endif
byte mark;                /* whose `.metadata` is there */
byte marks;               /* whose it may be after power loss */
byte renamed;             /* who has renamed */
byte overtaken;           /* had begun to write when another one renamed: must not commit any more */
byte born;                /* saves that have begun */
byte over;                /* saves that are over, whether they ended or died */
bool alone;               /* the youngest save began when all others were over, and none has begun since */
bool power = POWER;       /* may still be lost */

/* Only within steps that cannot be interrupted. */
hidden byte i, x;
byte k; /* the file that was chosen; 0 between steps */

#define STAGE_OF(f) (file[f] & STAGE)
#define FILE(s, r) ((s) * RANKS + (r))
#define SURE (SEEN | ON_DISK | GOOD)
#if defined(M_NO_FILE_SYNC) /* SaveJob::finish: files are not synced before they are handed in */
#define IS_SURE(f) (f >= FILE(OLD, 0) && (file[f] & SURE) == SURE)
#else
#define IS_SURE(f) ((file[f] & (SEEN | ON_DISK | STAGE)) == SURE)
#endif

#if RANKS == 1
#define ALL(s, P) (P(FILE(s, 0)))
#define ANY(s, P) (P(FILE(s, 0)))
#define SORT(s) skip
#elif RANKS == 2
#define ALL(s, P) (P(FILE(s, 0)) && P(FILE(s, 1)))
#define ANY(s, P) (P(FILE(s, 0)) || P(FILE(s, 1)))
#define SORT(s) IN_ORDER(FILE(s, 0), FILE(s, 1))
#else
#define ALL(s, P) (P(FILE(s, 0)) && P(FILE(s, 1)) && P(FILE(s, 2)))
#define ANY(s, P) (P(FILE(s, 0)) || P(FILE(s, 1)) || P(FILE(s, 2)))
#define SORT(s) IN_ORDER(FILE(s, 0), FILE(s, 1)); IN_ORDER(FILE(s, 1), FILE(s, 2)); IN_ORDER(FILE(s, 0), FILE(s, 1))
#endif
#define IN_ORDER(a, b)                                                        \
  if                                                                          \
  :: file[a] > file[b] -> x = file[a]; file[a] = file[b]; file[b] = x; x = 0  \
  :: else                                                                     \
  fi
#if SAVERS == 2
#define SORT_ALL SORT(0); SORT(1); SORT(2)
#define NAMES_EXIST (NAMED(0) && NAMED(1) && NAMED(2))
#else
#define SORT_ALL SORT(0); SORT(1); SORT(2); SORT(3)
#define NAMES_EXIST (NAMED(0) && NAMED(1) && NAMED(2) && NAMED(3))
#endif
/* The metadata itself is whole: its tmp was synced before the rename. */
#if defined(M_NO_TMP_SYNC) /* write_metadata: no fsync */
#define NAMED(s) (!HAS(marks, s) || (s == OLD && ALL(s, IS_SURE)))
#else
#define NAMED(s) (!HAS(marks, s) || ALL(s, IS_SURE))
#endif

#define EACH(f) f = 0; do :: f < FILES ->
#define NEXT(f) f++ :: else -> f = 0; break od

/* One of the files for which P holds; of files alike, one. */
#define FIRST(f) ((f) % RANKS == 0 || file[f] != file[(f) - ((f) % RANKS != 0)])
#define OPTION(f, P) :: P(f) && FIRST(f) -> k = f
#if SAVERS * RANKS + RANKS == 9
#define SOME(P) \
  if OPTION(0, P) OPTION(1, P) OPTION(2, P) OPTION(3, P) OPTION(4, P) OPTION(5, P) OPTION(6, P) OPTION(7, P) \
  OPTION(8, P) fi
#elif SAVERS * RANKS + RANKS == 8
#define SOME(P) \
  if OPTION(0, P) OPTION(1, P) OPTION(2, P) OPTION(3, P) OPTION(4, P) OPTION(5, P) OPTION(6, P) OPTION(7, P) fi
#elif SAVERS * RANKS + RANKS == 6
#define SOME(P) if OPTION(0, P) OPTION(1, P) OPTION(2, P) OPTION(3, P) OPTION(4, P) OPTION(5, P) fi
#elif SAVERS * RANKS + RANKS == 4
#define SOME(P) if OPTION(0, P) OPTION(1, P) OPTION(2, P) OPTION(3, P) fi
#else
#define SOME(P) if OPTION(0, P) OPTION(1, P) OPTION(2, P) fi
#endif

#define HOLDS(t, s) (holder[t] == (s) + 1)
#define IS_FREE(t) (holder[t] == 0)
/* Its tmp is there and locked by it: nobody may take anything of it away. */
#define LIVES(s) (LOCKS && !TAKE_OVER && (s) < SAVERS && HAS(tmps, s) && HOLDS(s, s))
#define ALONE(s) (alone && born == (s) + 1)
#define BORN (BIT(born) - 1)

/* fsync of the directory. */
inline sync_directory() {
  marks = BIT(mark);
  EACH(i)
    if
    :: file[i] & SEEN -> file[i] = file[i] | ON_DISK
    :: else -> file[i] = file[i] & ~ON_DISK
    fi;
  NEXT(i);
  SORT_ALL
}

inline unlink_file(f) {
  file[f] = file[f] & ~SEEN;
  x = f / RANKS;
  MUST(WHOLE, NAMES_EXIST);
  SORT_ALL
}

inline sort_of(s) {
  if
  :: s == 0 -> SORT(0)
  :: s == 1 -> SORT(1)
#if SAVERS == 3
  :: s == 2 -> SORT(2)
#endif
  fi
}

/* --- One rank's part: SaveJob, in writer.py's write_data --------------------------------------------------------- */

#define MAY_WRITE(f) ((f) < FILE(OLD, 0) && (STAGE_OF(f) == MAY || (STAGE_OF(f) == MADE && !HAS(over, (f) / RANKS))))

/* A rank that is dead is one that never gets a further step. It outlives its coordinator. */
proctype Ranks() {
end:
  do
  :: atomic {
       SOME(MAY_WRITE);
       if
       :: d_step {
            STAGE_OF(k) == MAY ->
write_file_created:
#if LATE
            file[k] = (file[k] & ~STAGE) | MADE;
#else
            file[k] = (file[k] & ~STAGE) | MADE | SEEN;
#endif
            x = k / RANKS; k = 0; sort_of(x)
          }
#if LATE
       :: d_step { /* flushed in the middle of it */
            STAGE_OF(k) == MADE && !(file[k] & SEEN) ->
            file[k] = file[k] | SEEN;
            x = k / RANKS; k = 0; sort_of(x)
          }
#endif
       :: d_step {
            STAGE_OF(k) == MADE ->
            /* Nobody sees the difference between these before the rank hands in. Of its fsync of the directory only
             * what it is for is modelled: that its own names are on the disk. */
write_file_reserved:
write_records_done:
write_data:
write_data_done:
write_file_cut:
write_file_synced:
write_files_synced:
#if LATE
            file[k] = file[k] | SEEN;
#endif
#if !defined(M_NO_RANK_DIRECTORY_SYNC)
            file[k] = file[k] | ON_DISK;
#endif
write_directory_synced:
            file[k] = (file[k] & ~STAGE) | GOOD;
            x = k / RANKS; k = 0; sort_of(x)
          }
       :: d_step {
            !HAS(over, k / RANKS) ->
            file[k] = (file[k] & ~STAGE) | FAILED;
            x = k / RANKS; k = 0; sort_of(x)
          }
       fi
     }
#if defined(M_RANK_DELETES) /* a rank removes its file when it hears of a failure, after it has handed in */
#define IS_HANDED_IN(f) ((f) < FILE(OLD, 0) && STAGE_OF(f) == GOOD && (file[f] & SEEN))
  :: atomic { SOME(IS_HANDED_IN); d_step { unlink_file(k); k = 0 } }
#endif
  od
}

/* --- The coordinator: Commit, in writer.py's prepare_global_plan and finish -------------------------------------- */

/* A process may die in front of any of its steps. */
#define DIES goto dead

#if SAVERS == 2
#define SOME_TMP if :: HAS(foreign, 0) -> t = 0 :: HAS(foreign, 1) -> t = 1 fi; foreign = foreign & ~BIT(t)
#else
#define SOME_TMP \
  if :: HAS(foreign, 0) -> t = 0 :: HAS(foreign, 1) -> t = 1 :: HAS(foreign, 2) -> t = 2 fi; foreign = foreign & ~BIT(t)
#endif
/* OTHERS: what a listing shows. SEEMS_THERE: the own tmp, asked for by its name. */
#if LATE
#define OTHERS(s) (tmps & ~unflushed & ~BIT(s))
#define SEEMS_THERE(s) true
#else
#define OTHERS(s) (tmps & ~BIT(s))
#define SEEMS_THERE(s) HAS(tmps, s)
#endif
#define IS_GOOD(f) (STAGE_OF(f) == GOOD)
#define IS_THERE(f) (STAGE_OF(f) == GOOD && (file[f] & SEEN))
#define IS_HERE(f) (file[f] & SEEN)
#define IS_IN(f) (STAGE_OF(f) == GOOD || STAGE_OF(f) == FAILED)
#define IS_BEGUN(f) (STAGE_OF(f) != ABSENT)
#define IS_FAILED(f) (STAGE_OF(f) == FAILED)
#define IS_OWN(f) ((f) / RANKS == s && (file[f] & SEEN))
#define IS_TO_GO(f) ((file[f] & LISTED(s)) && (file[f] & SEEN))
#define IS_LISTED(f) (file[f] & LISTED(s))
/* For the files of one save, by its number, where macros cannot count. */
#if SAVERS == 2
#define OF(P) ((s == 0 && ALL(0, P)) || (s == 1 && ALL(1, P)))
#define OF_ANY(P) ((s == 0 && ANY(0, P)) || (s == 1 && ANY(1, P)))
#define IS_ANY(P) (ANY(0, P) || ANY(1, P) || ANY(2, P))
#define BEGUN (ANY(0, IS_BEGUN) | ANY(1, IS_BEGUN) << 1)
#else
#define OF(P) ((s == 0 && ALL(0, P)) || (s == 1 && ALL(1, P)) || (s == 2 && ALL(2, P)))
#define OF_ANY(P) ((s == 0 && ANY(0, P)) || (s == 1 && ANY(1, P)) || (s == 2 && ANY(2, P)))
#define IS_ANY(P) (ANY(0, P) || ANY(1, P) || ANY(2, P) || ANY(3, P))
#define BEGUN (ANY(0, IS_BEGUN) | ANY(1, IS_BEGUN) << 1 | ANY(2, IS_BEGUN) << 2)
#endif

/* Removes the own tmp and lets go of its lock. Nobody can tell these apart: a lock of a name that is gone only meets
 * who opened it before, and who could have asked for the lock a moment earlier. */
inline give_back() {
  tmps = tmps & ~BIT(s);
#if LATE
  unflushed = unflushed & ~BIT(s);
#endif
  if
  :: HOLDS(s, s) -> holder[s] = 0
  :: else
  fi
}

inline list_data_files() {
  EACH(i)
    if
    :: (file[i] & SEEN) && i / RANKS != s -> file[i] = file[i] | LISTED(s)
    :: else
    fi;
  NEXT(i);
  SORT_ALL
}

inline forget_listing() {
  EACH(i)
    file[i] = file[i] & ~LISTED(s);
  NEXT(i);
  SORT_ALL
}

/* What a commit mark names is kept: it leaves the listing. */
inline keep_files_of(m) {
  EACH(i)
    if
    :: i / RANKS == m -> file[i] = file[i] & ~LISTED(s)
    :: else
    fi;
  NEXT(i);
  SORT_ALL
}

proctype Saver(byte s) {
  byte foreign;   /* tmps that are still to be looked at */
  byte t;         /* the one that is looked at */
  byte before;    /* whose marks ours replaced */
#if LATE
  byte found;     /* whose mark was there as it began */
#endif
  bool committed; /* the sweep is the one after the commit */
  bool ended;     /* the watcher of _save_session.py has given the right back */
#if defined(M_MARK_FIRST) || defined(M_LIST_LAST)
  byte read;
#endif

end_not_begun:
begin_directory_made:
begin_directory: /* Commit::begin */
#if defined(M_LOOK_FIRST) /* looks for live saves before its own tmp is there */
  d_step { born == s && born < SAVERS -> alone = (over == BORN); born++ };
  goto look;
create:
  if
  :: tmps = tmps | BIT(s)
  :: DIES
  fi;
#else
  d_step {
    born == s && (OVERWRITE || mark == NONE) ->
    alone = (over == BORN);
    born++;
#if LATE
    unflushed = unflushed | BIT(s);
#endif
    tmps = tmps | BIT(s)
  };
#endif
begin_tmp_created: /* LockFile::create: flush, flock, then fstat. A sweep that took us for dead has removed the name. */
#if LATE && !defined(M_NO_FLUSH)
  if
  :: unflushed = unflushed & ~BIT(s)
  :: DIES
  fi;
#endif
  if
  :: atomic {
       SEEMS_THERE(s) && IS_FREE(s) ->
#if LOCKS
       holder[s] = s + 1
#endif
     }
#if defined(M_NO_NLINK) /* does not ask whether the tmp still has its name */
  :: atomic { !HAS(tmps, s) && IS_FREE(s) -> holder[s] = s + 1 }
  :: atomic { !IS_FREE(s) -> goto refused }
#else
  :: atomic { !HAS(tmps, s) || !IS_FREE(s) -> goto refused }
#endif
  :: DIES
  fi;
begin_locked:
#if defined(M_LOOK_FIRST)
  goto sweep;
#endif
look: /* Commit::look_for_live_saves. Without locks every tmp seems to be free, and is left to the sweep. */
#if LOCKS && !defined(M_NO_LOOK)
  if
  :: foreign = OTHERS(s)
  :: DIES
  fi;
look_next:
  if
  :: atomic { foreign == 0 -> goto look_done }
  :: atomic { /* LockFile::probe: open, flock */
       foreign != 0 ->
       SOME_TMP;
       if
       :: !HAS(tmps, t) -> t = 0; goto look_next
       :: HAS(tmps, t) && IS_FREE(t) -> holder[t] = s + 1
       :: HAS(tmps, t) && !IS_FREE(t) ->
#if TAKE_OVER
          goto take_over
#else
          t = 0;
          goto refused
#endif
       fi
     }
  :: DIES
  fi;
  if
  :: atomic { d_step { holder[t] = 0; t = 0 }; goto look_next } /* LOCK_UN */
  :: DIES
  fi;
#if TAKE_OVER
take_over:
  if
  :: atomic { d_step { tmps = tmps & ~BIT(t); t = 0 }; goto look_next }
  :: DIES
  fi;
#endif
look_done:
#endif
#if defined(M_LOOK_FIRST)
  goto create;
#endif
#if !OVERWRITE
  if
  :: mark == NONE
  :: atomic { mark != NONE -> goto abandoned }
  :: DIES
  fi;
#endif
#if LATE
  if
  :: found = mark
  :: DIES
  fi;
#endif
#if !defined(M_NO_OWN_LOOK) /* a listing after that must have the own tmp */
  if
  :: HAS(tmps, s)
  :: atomic { !HAS(tmps, s) -> goto refused }
  :: DIES
  fi;
#endif

begin_looked:
sweep: /* sweep.cpp. A listing is no snapshot: it may read the tmps before the data files, or after them. */
#if defined(M_MARK_FIRST) || defined(M_LIST_LAST) /* the commit marks are read while a save may still rename */
  if
  :: read = mark
  :: DIES
  fi;
#endif
  if
  :: d_step { list_data_files() };
     if
     :: foreign = OTHERS(s)
     :: DIES
     fi
  :: foreign = OTHERS(s);
#if !defined(M_LIST_LAST)
     if
     :: d_step { list_data_files() }
     :: DIES
     fi
#endif
  :: DIES
  fi;
sweep_listed:
#if defined(M_NO_KILL)
  atomic { foreign = 0; goto look_again };
#endif
#if !defined(M_COMMITTED_KILLS) /* takes rights away though no tmp of its own tells it to others */
  atomic {
    if
    :: committed -> foreign = 0; goto look_again
    :: else
    fi
  };
#endif
probe_next:
  if
  :: atomic { foreign == 0 -> goto look_again }
  :: atomic { /* LockFile::probe: open, flock */
       foreign != 0 ->
       SOME_TMP;
#if LOCKS
       if
       :: !HAS(tmps, t) || !IS_FREE(t) -> t = 0; goto probe_next
       :: HAS(tmps, t) && IS_FREE(t)
       fi;
#if !defined(M_UNLOCKED_UNLINK) /* the lock of a dead save's tmp is not held while its name is removed */
       holder[t] = s + 1
#endif
     };
  :: DIES
  fi;
  if
  :: atomic {
#endif
       d_step {
         MUST(LIVE, !LIVES(t));
         tmps = tmps & ~BIT(t);
#if LOCKS && !defined(M_UNLOCKED_UNLINK)
         holder[t] = 0;
#endif
         t = 0
       };
sweep_tmp_removed:
       goto probe_next
     }
  :: DIES
  fi;
look_again:
#if !defined(M_NO_SECOND_LOOK) /* no look for tmps that could not be removed, or are new */
  if
  :: atomic { !IS_ANY(IS_LISTED) -> goto swept }
#if !defined(M_NO_OWN_TMP) /* does not ask whether its own right was taken away */
  :: atomic { IS_ANY(IS_LISTED) && !committed && !HAS(tmps, s) -> goto swept }
  :: atomic { IS_ANY(IS_LISTED) && (committed || HAS(tmps, s)) -> foreign = (BIT(SAVERS) - 1) & ~BIT(s) }
#else
  :: atomic { IS_ANY(IS_LISTED) -> foreign = (BIT(SAVERS) - 1) & ~BIT(s) }
#endif
  :: DIES
  fi;
again_next:
  if
  :: atomic {
       foreign != 0 ->
       SOME_TMP;
       if
       :: HAS(OTHERS(s), t) -> MUST(NO_BLOCK, !ALONE(s)); t = 0; foreign = 0; goto swept /* declined */
       :: !HAS(OTHERS(s), t) ->
          t = 0;
          if
          :: foreign != 0 -> goto again_next
          :: else
          fi
       fi
     }
  :: DIES
  fi;
#endif
  if
#if defined(M_MARK_FIRST)
  :: d_step { keep_files_of(read) }
#elif defined(M_LIST_LAST)
  :: d_step { list_data_files(); keep_files_of(read) }
#else
  :: d_step { keep_files_of(mark) }
#endif
  :: DIES
  fi;
  if
  :: atomic { !IS_ANY(IS_TO_GO) -> goto swept }
#if defined(M_NO_SWEEP_SYNC) /* deletes what a commit mark replaced that may not be on the disk */
  :: IS_ANY(IS_TO_GO)
#else
  :: d_step { IS_ANY(IS_TO_GO) -> sync_directory() }
  :: atomic { IS_ANY(IS_TO_GO) -> goto swept } /* the fsync failed */
#endif
  :: DIES
  fi;
sweep_directory_synced:
  if
  :: atomic { !IS_ANY(IS_TO_GO) -> goto swept }
  :: atomic {
       SOME(IS_TO_GO);
       d_step {
         x = k / RANKS;
         MUST(LIVE, !LIVES(x));
         file[k] = file[k] & ~LISTED(s);
         unlink_file(k);
         k = 0
       };
sweep_file_removed:
       goto sweep_directory_synced
     }
  :: DIES
  fi;
swept:
  atomic {
    skip;
    d_step { forget_listing() };
    if
    :: committed -> goto returned
    :: else
    fi
  };
begin_swept:
  if /* begin, again: room for the metadata */
  :: d_step {
       EACH(i)
         if
         :: i / RANKS == s -> file[i] = MAY
         :: else
         fi;
       NEXT(i)
     }
  :: goto abandoned /* there is none */
  :: DIES
  fi;

begin_done: /* Ranks write. The watcher may end the save: DCP's call has ended, or the deadline has passed. */
  if
  :: atomic { OF(IS_IN) && !OF_ANY(IS_FAILED) -> goto check }
#if defined(M_NOT_ALL) /* a rank that handed in nothing is not missed */
  :: atomic { OF_ANY(IS_GOOD) -> goto commit_checked }
#endif
  :: atomic { OF(IS_IN) && OF_ANY(IS_FAILED) -> goto abort }
  :: atomic { d_step { !ended -> give_back(); ended = 1 }; goto begin_done }
  :: atomic { ended -> goto dead }
  :: DIES
  fi;
check: /* Commit::check_files. No file comes back, so that to look at one after the other is to look at all at first. */
  if
  :: OF(IS_THERE)
  :: atomic { !OF(IS_THERE) -> MUST(NO_BLOCK, !ALONE(s) || ended); goto abort }
  :: DIES
  fi;
commit_checked: /* Commit::commit: check_right, write_metadata, check_right */
  if
  :: atomic { d_step { !ended -> give_back(); ended = 1 }; goto commit_checked }
#if defined(M_NO_CHECK_RIGHT) /* leaves it to the rename */
  :: !ended
#else
  :: atomic {
       SEEMS_THERE(s) && !ended ->
commit_metadata_filled:
commit_metadata_written:
#if LATE
       d_step { tmps = tmps | BIT(s); unflushed = unflushed & ~BIT(s) };
#endif
commit_metadata_synced:
       skip
     }
  :: atomic { !HAS(tmps, s) -> MUST(NO_BLOCK, !ALONE(s) || ended); goto abort }
#endif
  :: atomic { MUST(ONE_RIGHT, !HAS(renamed, s)); goto abort } /* the disk is full, or the deadline has passed */
  :: DIES
  fi;
#if LATE && !defined(M_NO_LAST_LOOK) /* Commit::look_again: a listing, then what it is asked for */
  if
  :: foreign = OTHERS(s)
  :: DIES
  fi;
  if
  :: atomic { foreign != 0 -> MUST(NO_BLOCK, !ALONE(s)); foreign = 0; goto abort }
  :: atomic { foreign == 0 && OF(IS_THERE) }
  :: atomic { foreign == 0 && !OF(IS_THERE) -> MUST(NO_BLOCK, !ALONE(s) || ended); goto abort }
  :: DIES
  fi;
  if
  :: atomic { mark == found }
  :: atomic { mark != found -> MUST(NO_BLOCK, !ALONE(s)); goto abort }
  :: DIES
  fi;
#endif
commit_decided:
  if /* Commit::rename_over_metadata */
  :: d_step {
       HAS(tmps, s) && (OVERWRITE || mark == NONE) ->
       MUST(ONE_RIGHT, !HAS(renamed, s));
       MUST(NEWEST, !HAS(overtaken, s));
       tmps = tmps & ~BIT(s);
       before = renamed | BIT(OLD) | BIT(NONE);
       renamed = renamed | BIT(s);
       overtaken = (overtaken | BEGUN) & ~over & ~renamed;
       mark = s;
       marks = marks | BIT(s);
       MUST(WHOLE, NAMES_EXIST)
     }
#if !OVERWRITE
  :: atomic { HAS(tmps, s) && mark != NONE -> goto after_rename } /* kExists */
#endif
  :: atomic { !HAS(tmps, s) -> MUST(NO_BLOCK, !ALONE(s)); goto after_rename } /* ENOENT: kSuperseded */
  :: goto after_rename /* EIO, and nothing was renamed */
  :: atomic { HAS(tmps, s) -> goto abort } /* no room, nothing was renamed, and the name is there to prove it */
  :: DIES
  fi;
commit_renamed:
  if
#if defined(M_NO_COMMIT_SYNC)
  :: skip
#else
  :: d_step { sync_directory() }
  :: goto after_rename /* kDurabilityUnknown; or the rename was done, and its answer an error */
#endif
  :: DIES
  fi;
commit_directory_synced:
rank_metadata_removed: /* Left out, see above. */
  atomic { committed = 1; goto sweep };
returned:
  if
  :: atomic {
       MUST(NEWEST, (marks & before) == 0);
       MUST(ONE_RIGHT, HAS(renamed, s));
commit_done:
       goto abandoned
     }
  :: DIES
  fi;

after_rename: /* Commit::abort, once a rename was attempted: it deletes nothing. */
#if defined(M_DELETE_AFTER_RENAME)
  goto abort;
#else
  goto abandoned;
#endif

abort: /* Commit::abort: the right first, then the files. */
  if
  :: d_step { give_back() }
  :: DIES
  fi;
abort_tmp_removed:
own_next:
  if
  :: atomic {
       SOME(IS_OWN);
       d_step { unlink_file(k); k = 0 };
abort_file_removed:
       goto own_next
     }
  :: atomic { !OF_ANY(IS_HERE) -> goto dead }
  :: DIES
  fi;

refused: /* kBusy */
  atomic {
    MUST(NO_BLOCK, !ALONE(s));
    goto abandoned
  };
abandoned:
  if
  :: d_step { give_back() }
  :: skip /* dies */
  fi;
dead: /* Its locks go with a process. */
  atomic {
    skip;
    d_step {
      over = over | BIT(s);
      overtaken = overtaken & ~BIT(s);
      i = 0;
      do
      :: i < SAVERS ->
         if
         :: HOLDS(i, s) -> holder[i] = 0
         :: else
         fi;
         i++
      :: else -> i = 0; break
      od;
      forget_listing();
      foreign = 0; t = 0; before = 0; committed = 0; ended = 0
#if LATE
      ; found = 0
#endif
#if defined(M_LIST_LAST) || defined(M_MARK_FIRST)
      ; read = 0
#endif
    }
  }
}

/* --- The world --------------------------------------------------------------------------------------------------- */

#if POWER
/* Those who have begun are over, or stopped where they were. Each change that was not synced is on the disk or is not;
 * of the tmps any may be there, also those that were removed. */
proctype Power() {
end:
  atomic {
    born > 0 && born < SAVERS && over == BORN;
    if
    :: HAS(marks, 0) -> mark = 0
    :: HAS(marks, 1) -> mark = 1
    :: HAS(marks, 2) -> mark = 2
    :: HAS(marks, 3) -> mark = 3
#if SAVERS == 3
    :: HAS(marks, 4) -> mark = 4
#endif
    fi;
    marks = BIT(mark);
    do
    :: k < FILES && ((file[k] & SEEN) != 0) == ((file[k] & ON_DISK) != 0) -> k++
    :: k < FILES && ((file[k] & SEEN) != 0) != ((file[k] & ON_DISK) != 0) ->
       if
       :: file[k] = (file[k] & STAGE) | SEEN
       :: file[k] = file[k] & STAGE
       fi;
       k++
    :: k == FILES -> k = 0; break
    od;
    do
    :: k < born ->
       if
       :: tmps = tmps | BIT(k)
       :: tmps = tmps & ~BIT(k)
       fi;
       k++
    :: k == born -> k = 0; break
    od;
    skip;
    d_step {
      EACH(i)
        if
        :: file[i] & SEEN -> file[i] = (file[i] & STAGE) | SEEN | ON_DISK
        :: STAGE_OF(i) == MAY || STAGE_OF(i) == MADE -> file[i] = ABSENT
        :: else -> file[i] = file[i] & STAGE
        fi;
      NEXT(i);
      SORT_ALL
    };
    MUST(WHOLE, NAMES_EXIST)
  }
}
#endif

#if READER
/* Reads the commit mark, then opens what it names. */
#define IS_WANTED(f) (file[f] & LISTED(SAVERS))
proctype Reader() {
  byte opened;
  d_step {
    mark != NONE ->
    opened = mark;
    EACH(i)
      if
      :: i / RANKS == mark -> file[i] = file[i] | LISTED(SAVERS)
      :: else
      fi;
    NEXT(i)
  };
  do
  :: atomic {
       SOME(IS_WANTED);
       if
       :: file[k] & SEEN ->
          MUST(READS, STAGE_OF(k) == GOOD);
          d_step { file[k] = file[k] & ~LISTED(SAVERS); k = 0; SORT_ALL }
       :: !(file[k] & SEEN) -> k = 0; MUST(READS, mark != opened); break
       fi
     }
  :: atomic { !IS_ANY(IS_WANTED) -> break }
  od;
  skip;
  d_step {
    opened = 0;
    EACH(i)
      file[i] = file[i] & ~LISTED(SAVERS);
    NEXT(i);
    SORT_ALL
  }
}
#endif

init {
  atomic {
#if EMPTY
    mark = NONE;
#else
    mark = OLD;
    d_step {
      EACH(i)
        if
        :: i / RANKS == OLD -> file[i] = SURE
        :: else
        fi;
      NEXT(i)
    };
#endif
    marks = BIT(mark);
    run Ranks();
#if POWER
    run Power();
#endif
#if READER
    run Reader();
#endif
    run Saver(0);
    run Saver(1);
#if SAVERS == 3
    run Saver(2)
#endif
  }
}
